// Numbers and times for people.

const whole = new Intl.NumberFormat("en");
export const count = (value) => whole.format(Math.round(Number(value)));

export function rate(value) {
  return value >= 100 ? count(value) : value >= 10 ? value.toFixed(1) : value ? value.toFixed(2) : "0";
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at++;
  }
  return `${at && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

export const ms = (value) => (value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`);

const two = (number) => String(number).padStart(2, "0");

/** Local time; with the date if it is not today. */
export function time(value) {
  if (value === null || value === undefined) return "–";
  const at = new Date(value);
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return at.toDateString() === new Date().toDateString() ? clock : `${day} ${clock}`;
}

export function duration(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 1) return "less than 1 s";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

/** One word for the browser: it stays on one line. */
export const ago = (value) => (value ? `${duration((Date.now() - new Date(value)) / 1000)} ago`.replaceAll(" ", "\u00a0") : "–");

export function until(value) {
  const seconds = (new Date(value) - Date.now()) / 1000;
  return seconds <= 0 ? "now" : `in ${duration(seconds)}`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
