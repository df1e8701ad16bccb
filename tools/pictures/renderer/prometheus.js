// Variables, queries and what Prometheus answers, as Grafana's data frames.
import { createDataFrame, FieldType } from "@grafana/data";

const chosen = new URLSearchParams(location.search);
const PROMETHEUS = chosen.get("prom");
export const TO = +chosen.get("to");
export const FROM = +chosen.get("from");
export const THEME = chosen.get("theme") || "dark";
const STEP = Math.max(15, Math.ceil((TO - FROM) / 400 / 5) * 5); // seconds; about as many points as a panel has pixels

export const problems = [];
window.problems = problems;

async function ask(path, parameters) {
  const answer = await fetch(`${PROMETHEUS}/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const { status, data, error } = await answer.json();
  if (status !== "success") throw new Error(error);
  return data;
}

// Variables by name: what they offer, what is chosen of it (null: all), and what stands for all.
export async function resolve(variables) {
  const found = {};
  for (const { name, query, allValue, current, hide, includeAll } of variables) {
    if (name === "datasource") {
      found[name] = { options: ["prometheus"], values: null, all: "prometheus" };
      continue;
    }
    const written = fill(query.query, found);
    const values = /^label_values\((.+), (\w+)\)$/s.exec(written);
    const result = /^query_result\((.+)\)$/s.exec(written);
    let options = [];
    if (values) options = await ask(`label/${values[2]}/values`, { "match[]": values[1], start: FROM, end: TO });
    if (result) options = (await ask("query", { query: result[1], time: TO })).result.map(({ metric }) => metric.label);
    const given = chosen.getAll(`var-${name}`);
    if (!current.value && !given.length) given.push(options[0]);
    const every = `(${options.join("|")})`; // as Grafana does without a word for all
    found[name] = { options, values: given.length ? given : null, all: allValue ?? every, pattern: !includeAll };
    if (!options.length && !hide && name !== "cluster") problems.push(`variable ${name} offers nothing`);
  }
  return found;
}

// Put variables into a query, or with `shown` into a text.
export function fill(text, variables, shown = false) {
  const own = {
    __rate_interval: `${Math.max(60, 4 * STEP)}s`,
    __interval: `${STEP}s`,
    __interval_ms: 1000 * STEP,
    __range: `${Math.round(TO - FROM)}s`,
    __range_s: Math.round(TO - FROM),
  };
  return text.replace(/\$(\w+)/g, (written, name) => {
    if (name in own) return own[name];
    if (!(name in variables)) return written; // $1 is label_replace's
    const { values, all, pattern } = variables[name];
    if (values === null) return shown ? "All" : all;
    if (pattern) return values[0]; // Grafana escapes what is one of several
    return shown ? values.join(", ") : values.map((value) => value.replace(/[.|()[\]{}+*?^$\\]/g, "\\\\$&")).join("|");
  });
}

// Ask what a panel asks; a target without an answer is a problem.
export async function frames(panel, variables) {
  const found = await Promise.all(
    panel.targets.map(async (target) => {
      try {
        const answered = await (target.instant ? now(target, variables) : over(target, variables));
        if (!answered.length) problems.push(`panel "${panel.title}" target ${target.refId}: no data`);
        return target.format === "table" ? [asTable(target, answered)] : answered.map((each) => asLine(target, each));
      } catch (error) {
        problems.push(`panel "${panel.title}" target ${target.refId}: ${error.message}`);
        return [];
      }
    }),
  );
  return found.flat();
}

async function now(target, variables) {
  const { result } = await ask("query", { query: fill(target.expr, variables), time: TO });
  return result.map(({ metric, value }) => ({ metric, values: [value] }));
}

async function over(target, variables) {
  const start = Math.ceil(FROM / STEP) * STEP;
  const { result } = await ask("query_range", { query: fill(target.expr, variables), start, end: TO, step: STEP });
  return result.map(({ metric, values }) => {
    const known = new Map(values);
    const times = Array.from({ length: Math.floor((TO - start) / STEP) + 1 }, (_, number) => start + number * STEP);
    return { metric, values: times.map((time) => [time, known.get(time) ?? null]) };
  });
}

function asLine({ refId, legendFormat }, { metric, values }) {
  const name = legendFormat.replace(/\{\{(\w+)\}\}/g, (_, label) => metric[label] ?? "");
  const times = values.map(([time]) => 1000 * time);
  const numbers = values.map(([, value]) => (value === null ? null : +value));
  const config = { displayNameFromDS: name };
  return createDataFrame({
    refId,
    name,
    fields: [
      { name: "Time", type: FieldType.time, values: times, config: { interval: 1000 * STEP } },
      { name: "Value", type: FieldType.number, labels: metric, values: numbers, config },
    ],
  });
}

function asTable({ refId }, answered) {
  const labels = [...new Set(answered.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const column = (name) => ({ name, type: FieldType.string, values: answered.map(({ metric }) => metric[name] ?? "") });
  const values = answered.map(({ values: [[, value]] }) => +value);
  return createDataFrame({
    refId,
    fields: [
      { name: "Time", type: FieldType.time, values: answered.map(() => 1000 * TO) },
      ...labels.map(column),
      { name: `Value #${refId}`, type: FieldType.number, values },
    ],
  });
}
