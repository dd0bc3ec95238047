/** Preact with htm: html`<p>…</p>` makes elements, and all that is put in is text, never HTML. */

import htm from "./vendor/htm.module.js";
import { h } from "./vendor/preact.module.js";

export const html = htm.bind(h);
export { render } from "./vendor/preact.module.js";
export { useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-hooks.module.js";
