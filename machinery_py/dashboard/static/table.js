/**
 * Tables: cards on a phone, only what is seen in the page, and rows that stay where they are while
 * the pointer or the keyboard is on one of them.
 */

import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { duration, number } from "./format.js";
import { link, shortId, Time } from "./parts.js";

const SPARE = 15; // rows above and below the window
const SMALL = 100; // rows that are always all in the page

/** Say whether somebody is about to press something in this element. */
export const isHeld = (element) =>
  Boolean(element && (element.matches(":hover") || element.querySelector(":focus-visible")));

/**
 * Return the rows in an order that does not change while the table is held: values are new, rows
 * that are gone stay where they were, new ones come last.
 */
function useSteady(rows, rowKey, table) {
  const shown = useRef([]);
  if (isHeld(table.current)) {
    const fresh = new Map(rows.map((row) => [rowKey(row), row]));
    const old = shown.current.map((row) => fresh.get(rowKey(row)) || row);
    const known = new Set(old.map(rowKey));
    shown.current = [...old, ...rows.filter((row) => !known.has(rowKey(row)))];
  } else {
    shown.current = rows;
  }
  return shown.current;
}

/** Return [first, last, height of a row]: the rows in the window, and some around it. */
function useWindow(total, table) {
  const [range, set] = useState([0, SMALL, 0]);
  useLayoutEffect(() => {
    const look = () => {
      const row = table.current.querySelector("tr[data-row]");
      if (!row) return;
      const height = row.getBoundingClientRect().height;
      const top = table.current.tBodies[0].getBoundingClientRect().top;
      const first = Math.max(0, Math.floor(-top / height) - SPARE);
      const last = Math.max(SPARE, Math.ceil((innerHeight - top) / height) + SPARE);
      const found = [Math.min(first, total), Math.min(last, total), height];
      set((old) => (old.every((one, i) => one === found[i]) ? old : found));
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [total]);
  return range;
}

const Spacer = ({ rows, height, span }) =>
  rows > 0 &&
  html`<tr aria-hidden="true">
    <td class="spacer" colspan=${span} style=${{ height: `${rows * height}px` }}></td>
  </tr>`;

// Columns: {head, kind, cell(row)}; kind: classes of the cells

export const text = (head, field, kind = "short") => ({ head, kind, cell: (one) => one[field] });

export const time = (head, field, none) => ({
  head,
  kind: "time",
  cell: (one) => html`<${Time} at=${one[field]} none=${none} />`,
});

/** A number; with `href(row)` a link to what was counted. */
export const figure = (head, field, href) => ({
  head,
  kind: "number",
  cell: (one) => (href ? html`<a href=${href(one)}>${number(one[field])}</a>` : number(one[field])),
});

export const seconds = (head, value) => ({
  head,
  kind: "number",
  cell: (one) => (value(one) ? duration(value(one)) : "–"),
});

/** The name of the row, a link to its page; beside it small words. */
export const named = (head, field, href, more = () => null) => ({
  head,
  kind: "name",
  cell: (one) => html`<a data-open href=${href(one)}>${one[field] || "unknown"}</a> ${more(one)}`,
});

export const taskColumn = named(
  "Task",
  "name",
  (one) => link("task", { uuid: one.uuid }),
  (one) => html`<span class="id">${shortId(one.uuid)}</span>`,
);

export const queueColumn = named(
  "Queue",
  "queue",
  (one) => link("tasks", { queue: one.queue }),
  (one) => one.paused && html`<span class="badge">paused</span>`,
);

export const actions = (cell) => ({ head: "Actions", kind: "actions", cell });

/**
 * Args:
 *   label: what the table holds, for screen readers.
 *   rows, rowKey: what it shows, and the function that tells two of them apart.
 *   selection: {chosen: Set of keys, set(Set)}; without it nothing can be chosen.
 *   onEnd: called when the last rows come near.
 *   steady: false: the caller sees to it that rows stay where they are.
 */
export function Table(props) {
  const { label, columns, rows, rowKey, selection, onEnd, steady = true, kind = "" } = props;
  const table = useRef(null);
  const held = useSteady(rows, rowKey, table);
  const shown = steady ? held : rows;
  const [from, to, height] = useWindow(shown.length, table);
  const [first, last] = shown.length > SMALL ? [from, to] : [0, shown.length];
  const drawn = shown.slice(first, last);
  const span = columns.length + (selection ? 1 : 0);
  useLayoutEffect(() => {
    if (onEnd && height && to === shown.length) onEnd();
  });
  const choose = (key) => {
    const chosen = new Set(selection.chosen);
    if (!chosen.delete(key)) chosen.add(key);
    selection.set(chosen);
  };
  const all = selection && shown.every((row) => selection.chosen.has(rowKey(row)));
  return html`<table ref=${table} class=${kind} aria-rowcount=${shown.length + 1}>
    <caption>${label}</caption>
    <thead>
      <tr>
        ${selection &&
        html`<th scope="col" class="choose">
          <input type="checkbox" aria-label="Select all rows" checked=${all}
            onChange=${() => selection.set(new Set(all ? [] : shown.map(rowKey)))} />
        </th>`}
        ${columns.map((one) => html`<th scope="col" class=${one.kind}>${one.head}</th>`)}
      </tr>
    </thead>
    <tbody>
      <${Spacer} rows=${first} height=${height} span=${span} />
      ${drawn.map((row, index) => {
        const key = rowKey(row);
        const chosen = selection && selection.chosen.has(key);
        return html`<tr key=${key} data-row=${key} tabindex="-1" aria-rowindex=${first + index + 2}
          class=${chosen ? "chosen" : ""}>
          ${selection &&
          html`<td class="choose">
            <input type="checkbox" aria-label=${`Select ${key}`} checked=${chosen}
              onChange=${() => choose(key)} />
          </td>`}
          ${columns.map(
            (one) => html`<td class=${one.kind} data-label=${one.head}>${one.cell(row)}</td>`,
          )}
        </tr>`;
      })}
      <${Spacer} rows=${shown.length - last} height=${height} span=${span} />
    </tbody>
  </table>`;
}
