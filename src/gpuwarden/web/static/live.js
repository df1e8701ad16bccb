// Poller of the API: the history once, then the state repeatedly, and the incidents now and then. `onState` gets each answer, `onFailure` each failure
// with its reason and start. `more` returns what else a page wants with each answer.
//
// It asks at most as often as the daemon polls, not at all in a hidden tab, and less often while the daemon does not answer.

const MIN_SECONDS = 3; // from an answer to the next request: limits the cost of a viewer for the daemon
const MAX_SECONDS = 15; // between retries
const TIMEOUT_SECONDS = 5;
const INCIDENTS_SECONDS = 15; // between requests for the incidents

export class Live {
  #onState;
  #onFailure;
  #more;
  #timer = 0;
  #failures = 0;
  #since = 0; // time of the first failed request, in milliseconds
  #behind = true; // true if the history has points that are missing here
  #round = 0;
  #incidents = { due: 0, found: [] }; // the last answer; due in milliseconds

  constructor(onState, onFailure, more = async () => null) {
    this.#onState = onState;
    this.#onFailure = onFailure;
    this.#more = more;
    document.addEventListener("visibilitychange", () => this.#turn());
    window.addEventListener("online", () => this.#turn());
    this.#turn();
  }

  #turn() {
    clearTimeout(this.#timer);
    this.#round += 1; // answers of earlier rounds are ignored
    if (document.hidden) {
      this.#behind = true;
      this.#onFailure("hidden", Date.now());
    } else {
      this.#ask(this.#round);
    }
  }

  async #ask(round) {
    const asked = Date.now();
    let seconds;
    try {
      const history = this.#behind ? (await get("api/v1/history")).body : null;
      const { body, now } = await get("api/v1/state");
      const incidents = await this.#findIncidents();
      const more = await this.#more(body);
      if (round !== this.#round) return;
      try {
        this.#onState(body, history, now, incidents, more);
      } catch (error) {
        console.error(error);
        throw new Broken(String(error));
      }
      this.#failures = 0;
      this.#behind = false;
      seconds = Math.max(body.daemon.poll_interval_seconds, MIN_SECONDS);
    } catch (error) {
      if (round !== this.#round) return;
      if (!this.#failures) this.#since = asked;
      this.#failures += 1;
      this.#behind = true;
      seconds = Math.min(2 ** (this.#failures - 1), MAX_SECONDS);
      // Before `onFailure`, so that the page continues even if that fails.
      this.#timer = setTimeout(() => this.#ask(round), seconds * 1000);
      this.#onFailure(error instanceof Refusal ? "refused" : error instanceof Broken ? "broken" : "away", this.#since, error);
      return;
    }
    this.#timer = setTimeout(() => this.#ask(round), seconds * 1000);
  }

  // Return the newest incidents; a failure leaves the known ones, and costs nothing else of the page.
  async #findIncidents() {
    if (Date.now() >= this.#incidents.due) {
      this.#incidents.due = Date.now() + INCIDENTS_SECONDS * 1000;
      try {
        this.#incidents.found = (await get("api/v1/incidents?limit=20")).body.incidents;
      } catch (error) {
        console.warn(error);
      }
    }
    return this.#incidents.found;
  }
}

class Refusal extends Error {}
class Broken extends Error {}

const ROOT = new URL("..", import.meta.url); // of the daemon, which a proxy may serve below a path

// Return the answer and the daemon's time, which may differ from this machine's clock.
export async function get(path) {
  const answer = await fetch(new URL(path, ROOT), { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_SECONDS * 1000) });
  if (answer.status === 503) throw new Refusal((await answer.text()).slice(0, 300)); // no poll yet; a proxy sends other texts
  if (!answer.ok) throw Object.assign(new Error(`status ${answer.status}`), { status: answer.status });
  const date = Date.parse(answer.headers.get("date"));
  return { body: await answer.json(), now: (Number.isNaN(date) ? Date.now() : date) / 1000 };
}
