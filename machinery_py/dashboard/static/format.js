/** Numbers, moments and lengths of time, as text. */

const NUMBER = new Intl.NumberFormat("en");
const EXACT = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "medium" });
const CLOCK = new Intl.DateTimeFormat("sv-SE", { timeStyle: "short" });

let ahead = 0; // milliseconds that the server's clock is ahead of this one

/** Note the server's time, so that ages are right with a wrong clock in the browser. */
export const noteServerTime = (at) => {
  ahead = Date.parse(at) - Date.now() || 0;
};

export const now = () => Date.now() + ahead;

export const number = (value) => NUMBER.format(value);

export const plural = (value, word) => `${number(value)} ${word}${value === 1 ? "" : "s"}`;

/** Return milliseconds since 1970, or null for no moment; Go writes the year 1 for none. */
export function moment(value) {
  const at = value ? Date.parse(value) : NaN;
  return at > 0 ? at : null;
}

export const exact = (value) => `${EXACT.format(moment(value))} here · ${value}`;

export const clock = (seconds) => CLOCK.format(seconds * 1000);

const UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

/** Return a length such as "0.4 s", "12 s", "3 min 20 s" or "2 d 4 h". */
export function duration(seconds) {
  if (seconds < 0.0005) return "< 1 ms";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  let rest = Math.round(seconds);
  const first = UNITS.findIndex(([, size]) => rest >= size);
  const parts = UNITS.slice(first, first + 2).map(([unit, size]) => {
    const amount = Math.floor(rest / size);
    rest -= amount * size;
    return amount ? `${amount} ${unit}` : "";
  });
  return parts.filter(Boolean).join(" ");
}

/** Return a length in its largest unit alone, for ages that are looked at in passing. */
const roughly = (seconds) => {
  const [unit, size] = UNITS.find(([, one]) => seconds >= one) || ["s", 1];
  return `${Math.floor(seconds / size)} ${unit}`;
};

export function relative(value) {
  const seconds = (now() - moment(value)) / 1000;
  if (Math.abs(seconds) < 1) return "just now";
  return seconds > 0 ? `${roughly(seconds)} ago` : `in ${roughly(-seconds)}`;
}

/** Return the seconds between two moments; null if one is missing. */
export function between(start, end) {
  const [from, to] = [moment(start), moment(end)];
  return from === null || to === null ? null : Math.max(0, (to - from) / 1000);
}

export function bytes(value) {
  if (!value) return "unknown";
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"][power];
  return `${(value / 1024 ** power).toFixed(power > 1 ? 1 : 0)} ${unit}`;
}
