// Asks the daemon: its history once, then the state again and again. What it hears goes to `heard`, that it hears nothing
// to `silent`, with the reason and since when.
//
// No faster than the daemon polls, and not in a tab that nobody sees. While the daemon does not answer it asks ever less
// often, and goes on by itself.

const LEAST_SECONDS = 3; // from an answer to the next question: what a viewer may cost the daemon
const MOST_SECONDS = 15; // while it does not answer
const PATIENCE_SECONDS = 5;

export class Live {
  #heard;
  #silent;
  #timer = 0;
  #failures = 0;
  #since = 0; // when the first of those questions was asked, in milliseconds
  #behind = true; // whether points are missing that the history has
  #round = 0;

  constructor(heard, silent) {
    this.#heard = heard;
    this.#silent = silent;
    document.addEventListener("visibilitychange", () => this.#turn());
    window.addEventListener("online", () => this.#turn());
    this.#turn();
  }

  #turn() {
    clearTimeout(this.#timer);
    this.#round += 1; // what is under way is nobody's any more
    if (document.hidden) {
      this.#behind = true;
      this.#silent("hidden", Date.now());
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
      if (round !== this.#round) return;
      try {
        this.#heard(body, history, now);
      } catch (error) {
        console.error(error);
        throw new Broken(String(error));
      }
      this.#failures = 0;
      this.#behind = false;
      seconds = Math.max(body.daemon.poll_interval_seconds, LEAST_SECONDS);
    } catch (error) {
      if (round !== this.#round) return;
      if (!this.#failures) this.#since = asked;
      this.#failures += 1;
      this.#behind = true;
      seconds = Math.min(2 ** (this.#failures - 1), MOST_SECONDS);
      // Before it is told: should that fail too, the page goes on all the same.
      this.#timer = setTimeout(() => this.#ask(round), seconds * 1000);
      this.#silent(error instanceof Refusal ? "refused" : error instanceof Broken ? "broken" : "away", this.#since, error);
      return;
    }
    this.#timer = setTimeout(() => this.#ask(round), seconds * 1000);
  }
}

class Refusal extends Error {}
class Broken extends Error {}

// Return what the daemon answers, and what time it is there: this machine's clock may be another.
async function get(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_SECONDS * 1000) });
  if (answer.status === 503) throw new Refusal((await answer.text()).slice(0, 300)); // no poll; a proxy has others
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const date = Date.parse(answer.headers.get("date"));
  return { body: await answer.json(), now: (Number.isNaN(date) ? Date.now() : date) / 1000 };
}
