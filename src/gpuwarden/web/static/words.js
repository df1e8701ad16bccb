// Quantities and names for people.

import { CLOCK_REASONS, ERROR_KIND_WORDS } from "./tables.js"; // made by web/static_files.py

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

export const known = (value) => value !== undefined && value !== null;

// Bytes with three digits: 187 MiB, 1.25 GiB.
export function amount(count) {
  for (const [unit, name] of UNITS) {
    if (count >= unit) {
      const value = count / unit;
      return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${name}`;
    }
  }
  return `${count.toFixed(0)} B`;
}

// Bytes of a total, in the same unit, as in `gpuwarden top`: 60.3 of 79.6 GiB.
export function part(count, whole) {
  const [unit, name] = UNITS.find(([unit]) => whole >= unit) ?? [1, "B"];
  return `${(count / unit).toFixed(1)} of ${(whole / unit).toFixed(1)} ${name}`;
}

// Duration, as in the daemon's texts (gpuwarden/formatting.py): 0.4s, 45s, 2h13m.
export function lasting(seconds) {
  if (seconds < 9.95) return seconds ? `${seconds.toFixed(1)}s` : "0s";
  const whole = Math.round(seconds);
  const two = (number) => String(Math.floor(number)).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two((whole % 3600) / 60)}m`;
  return `${Math.floor(whole / 86400)}d${two((whole % 86400) / 3600)}h`;
}

// Time of a step: 12.3 ms, 1.25 s.
export function step(seconds) {
  const milliseconds = Number((seconds * 1000).toPrecision(3));
  if (milliseconds < 1000) return milliseconds >= 0.001 ? `${milliseconds} ms` : "0 ms";
  return seconds < 10 ? `${Number(seconds.toPrecision(3))} s` : lasting(seconds);
}

// Forecast: in about 33s (31s to 35s).
export function forecast(seconds, lower, upper) {
  if (!seconds) return "at any moment";
  return `in about ${lasting(seconds)} (${known(lower) ? lasting(lower) : "now"} to ${known(upper) ? lasting(upper) : "longer"})`;
}

// Growth per minute, or per hour if it is slow.
export function rate(bytesPerSecond) {
  const byMinute = bytesPerSecond * 60;
  return byMinute >= 2 ** 20 ? `${amount(byMinute)} per minute` : `${amount(bytesPerSecond * 3600)} per hour`;
}

// Energy, as in the daemon's texts: 4.7 Wh, 473 Wh, 1.25 kWh.
export function energy(joules) {
  const hours = joules / 3600;
  return hours < 999.5 ? `${hours.toFixed(hours >= 99.95 ? 0 : 1)} Wh` : `${(hours / 1000).toFixed(2)} kWh`;
}

export const percent = (ratio) => `${(ratio * 100).toFixed(0)} %`;
export const degrees = (celsius) => `${celsius.toFixed(0)} °C`;
export const hertz = (value) => (value < 1e9 ? `${(value / 1e6).toFixed(0)} MHz` : `${(value / 1e9).toFixed(2)} GHz`);
export const watts = (value) => `${value.toFixed(0)} W`;
// Power in kilowatts, from one on: 530 W, 5.60 kW.
export const power = (value) => (value < 999.5 ? watts(value) : `${(value / 1000).toFixed(2)} kW`);
// Steps per second, with three digits.
export const pace = (steps) => (steps && steps < 999.5 ? steps.toPrecision(3) : steps.toFixed(0));
const MAX_CHARACTERS = 120;
// An untrusted name, cut to the room that there is; a blank one could not be clicked.
export const short = (name) => (!name.trim() ? "unnamed" : name.length > MAX_CHARACTERS ? `${[...name.slice(0, 2 * MAX_CHARACTERS)].slice(0, MAX_CHARACTERS).join("")}…` : name);
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
export const plain = (name) => name.replaceAll("_", " ");
export const clockReason = (name) => CLOCK_REASONS[name] ?? plain(name);
export const errorKind = (kind) => ERROR_KIND_WORDS[kind] ?? plain(kind);
// Behind the name of an exception, as in the daemon's texts: ResourceExhaustedError, out of device memory.
export const errorWords = (kind) => (kind === "other" ? "" : `, ${errorKind(kind)}`);
export const several = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

// Time of day in the browser's time zone, with the date if it is not today.
export function clock(seconds) {
  const at = new Date(seconds * 1000);
  if (Number.isNaN(at.getTime())) return "?";
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const today = at.toDateString() === new Date().toDateString();
  return today ? time : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}
