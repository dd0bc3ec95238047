/** Tasks or steps as boxes from left to right, with lines between them. */

import { html } from "./preact.js";

const [WIDTH, HEIGHT] = [168, 46]; // pixels, of a box
const [WIDE, HIGH] = [40, 12]; // pixels, between boxes
const LETTERS = 22; // of a line in a box

const cut = (text) => (text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text);

function Box({ of, x, y }) {
  const box = html`<g class="box is-${of.state.toLowerCase()}" transform="translate(${x} ${y})">
    <title>${[of.title, of.note].filter(Boolean).join(": ")}</title>
    <rect width=${WIDTH} height=${HEIGHT} rx="6" />
    <text x="10" y=${of.note ? 19 : 28} class="name">${cut(of.title)}</text>
    <text x="10" y="36">${cut(of.note)}</text>
  </g>`;
  return of.href ? html`<a href=${of.href}>${box}</a>` : box;
}

/** Each box of a column goes on to each of the next: over one line between them. */
function lines(from, to, x) {
  const [left, middle] = [x + WIDTH, x + WIDTH + WIDE / 2];
  const path = [
    ...from.map((y) => `M${left} ${y}H${middle}V${to[0]}`),
    ...to.map((y) => `M${middle} ${from[0]}V${y}H${left + WIDE}`),
  ];
  return html`<path key=${x} d=${path.join("")} />`;
}

/**
 * @param columns of boxes: `key`, `title`, `note` (a second line, or ""), `state` (which colours
 *   it) and perhaps `href`.
 */
export function Graph({ label, columns }) {
  if (!columns.length) return null;
  const rows = Math.max(...columns.map((one) => one.length));
  const height = rows * (HEIGHT + HIGH) - HIGH;
  const left = (at) => at * (WIDTH + WIDE);
  const tops = columns.map((column) =>
    column.map((_, i) => (height - column.length * (HEIGHT + HIGH) + HIGH) / 2 + i * (HEIGHT + HIGH)),
  );
  const middles = tops.map((some) => some.map((y) => y + HEIGHT / 2));
  return html`<div class="graph" role="region" aria-label=${label} tabindex="0">
    <svg width=${left(columns.length) - WIDE} height=${height} role="group" aria-label=${label}>
      ${columns.slice(1).map((_, i) => lines(middles[i], middles[i + 1], left(i)))}
      ${columns.flatMap((column, at) =>
        column.map((one, i) => html`<${Box} key=${one.key} of=${one} x=${left(at)} y=${tops[at][i]} />`),
      )}
    </svg>
  </div>`;
}
