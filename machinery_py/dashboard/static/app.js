/** The shell of the dashboard: addresses, navigation, keyboard, colours, and its own troubles. */

import { html, render, useEffect, useState } from "./preact.js";
import { startLive, useLive } from "./api.js";
import {
  Dialog, Dialogs, link, Messages, openDialog, remember, remembered, Time,
} from "./parts.js";
import { Dead } from "./pages/dead.js";
import { Errors } from "./pages/errors.js";
import { Overview } from "./pages/overview.js";
import { Queues } from "./pages/queues.js";
import { Schedules } from "./pages/schedules.js";
import { Task } from "./pages/task.js";
import { Tasks } from "./pages/tasks.js";
import { Worker, Workers } from "./pages/workers.js";
import { Workflow, Workflows } from "./pages/workflows.js";

// name of the page: [its component, its word in the navigation, the key after "g"]
const PAGES = {
  "": [Overview, "Overview", "o"],
  queues: [Queues, "Queues", "q"],
  tasks: [Tasks, "Tasks", "t"],
  workflows: [Workflows, "Workflows", "f"],
  errors: [Errors, "Errors", "e"],
  dead: [Dead, "Dead letters", "d"],
  schedules: [Schedules, "Schedules", "s"],
  workers: [Workers, "Workers", "w"],
  task: [Task],
  worker: [Worker],
  workflow: [Workflow],
};
const WITHIN = { task: "tasks", worker: "workers", workflow: "workflows" }; // pages without a place of their own
const THEMES = { auto: "system", light: "light", dark: "dark" };

function route() {
  const [page, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { page: page in PAGES ? page : "", query: new URLSearchParams(query), key: location.hash };
}

function useRoute() {
  const [at, set] = useState(route);
  useEffect(() => {
    const follow = () => set(route());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return at;
}

// Keyboard

const KEYS = [
  ["/", "go to the filter"],
  ["j, k", "next and previous row"],
  ["Enter", "open the row"],
  ["x", "select the row"],
  ...Object.values(PAGES).filter((one) => one[2]).map(([, word, key]) => [`g ${key}`, word]),
  ["?", "this list"],
];

function Help({ close }) {
  const [on, setOn] = useState(remembered("keys") !== "off");
  const change = (event) => {
    setOn(event.target.checked);
    remember("keys", event.target.checked ? "on" : "off");
  };
  return html`<${Dialog} title="Keyboard" close=${close}>
    <dl class="keys">
      ${KEYS.map(
        ([key, words]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${words}</dd></div>`,
      )}
    </dl>
    <label class="check">
      <input type="checkbox" checked=${on} onChange=${change} /> Single keys are commands
    </label>
    <footer><button type="button" class="primary" onClick=${close}>Close</button></footer>
  </${Dialog}>`;
}

const help = () => openDialog((close) => html`<${Help} close=${close} />`);

function stepRow(step) {
  const rows = [...document.querySelectorAll("tr[data-row]")];
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  const seen = rows.findIndex((row) => row.getBoundingClientRect().top >= 0);
  const next = rows[at < 0 ? Math.max(0, seen) : at + step];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

let afterG = false;

function pressed(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (document.querySelector("dialog[open]")) return;
  if (target.matches("input:not([type=checkbox]), select, textarea")) {
    if (key === "Escape") target.blur();
    return;
  }
  const row = target.closest("tr[data-row]");
  if (key === "Enter" && target === row) row.querySelector("[data-open]")?.click();
  if (remembered("keys") === "off" && key !== "?") return;
  const page = Object.keys(PAGES).find((name) => PAGES[name][2] === key);
  if (afterG && page !== undefined) location.hash = link(page);
  else if (key === "/") document.querySelector("[data-filter]")?.focus();
  else if (key === "?") help();
  else if (key === "j" || key === "k") stepRow(key === "j" ? 1 : -1);
  else if (key === "x") row?.querySelector("input[type=checkbox]")?.click();
  else if (key !== "g") return;
  afterG = key === "g";
  event.preventDefault();
}

function Theme() {
  const [theme, set] = useState(document.documentElement.dataset.theme || "auto");
  const next = Object.keys(THEMES)[(Object.keys(THEMES).indexOf(theme) + 1) % 3];
  const change = () => {
    document.documentElement.dataset.theme = next;
    remember("theme", next);
    set(next);
    dispatchEvent(new Event("machinery-theme"));
  };
  return html`<button type="button" class="plain theme" onClick=${change}
    title=${`Change to ${THEMES[next]}`}>Theme: ${THEMES[theme]}</button>`;
}

/** How the page is kept up to date, in one or two words. */
function Connection({ live: { how, overview, error } }) {
  const words = { live: "live", polling: "every 2 s", away: "no connection" };
  const title = error ? error.message : overview ? `${overview.broker}\n${overview.backend}` : "";
  return html`<span class=${`connection ${overview?.trouble ? "away" : how}`} title=${title}>
    ${overview?.trouble ? "store away" : words[how] || how}</span>`;
}

/** What is wrong, over the foot of the page: nothing moves when it appears. */
function Trouble({ live: { overview, error } }) {
  const away = overview?.trouble && `The store is away: ${overview.trouble}`;
  const words = error ? error.message : away;
  return html`<div class="trouble" role="alert">
    ${words &&
    html`<p>${words}. It is asked again until it answers.
      ${overview?.at && html` What is shown was seen <${Time} at=${overview.at} />.`}</p>`}
  </div>`;
}

const focusHeading = () => document.querySelector("h1")?.focus({ preventScroll: true });

function App() {
  const { page, query } = useRoute();
  const live = useLive();
  const { overview } = live;
  const [Page, word] = PAGES[page];
  const here = WITHIN[page] || page;
  const subject = query.get("uuid") || query.get("name") || page;
  useEffect(() => {
    document.title = `${word || subject} · machinery`;
    focusHeading();
    scrollTo(0, 0);
  }, [page, WITHIN[page] && subject]);
  return html`
    <button type="button" class="skip" onClick=${focusHeading}>Skip to the content</button>
    <header class="top">
      <a class="brand" href="#/">machinery</a>
      <${Connection} live=${live} />
      ${overview?.read_only && html`<span class="badge">read-only</span>`}
      ${overview?.user && html`<span class="muted user">${overview.user}</span>`}
      <nav aria-label="Pages"><ul>
        ${Object.entries(PAGES).map(
          ([name, [, text]]) => text && html`<li key=${name}>
            <a href=${link(name)} aria-current=${name === here ? "page" : null}>${text}</a></li>`,
        )}
      </ul></nav>
      <div class="tools">
        <${Theme} />
        <button type="button" class="plain" onClick=${help}>Keyboard <kbd>?</kbd></button>
        ${overview && html`<span class="muted">machinery_py ${overview.version}</span>`}
      </div>
    </header>
    <main id="content" key=${page}><${Page} query=${query} /></main>
    <${Messages} />
    <${Trouble} live=${live} />
    <${Dialogs} />`;
}

addEventListener("keydown", pressed);
startLive();
render(html`<${App} />`, document.getElementById("app"));
