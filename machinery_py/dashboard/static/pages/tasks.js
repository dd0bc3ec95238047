import { html, useEffect, useRef, useState } from "../preact.js";
import { get, toQuery, useData, useLive, useMayChange } from "../api.js";
import { BulkBar } from "../bulk.js";
import { between, number, plural } from "../format.js";
import {
  Instead, isFinished, link, Progress, Since, State, STATES, stateWord, Time,
} from "../parts.js";
import { figure, isHeld, seconds, Table, taskColumn, text, time } from "../table.js";

const PAGE = 100; // tasks that are asked for at once
const TYPING = 350; // milliseconds after the last key until a search begins
const STEPS = 40; // pages without a find before the search stops and offers to go on

/** Read the filter from the address. */
const filterOf = (query) => ({
  state: query.getAll("state").filter((one) => STATES.includes(one)),
  ...Object.fromEntries(
    ["name", "queue", "worker", "text", "since", "until"].map((key) => [key, query.get(key) || ""]),
  ),
});

/**
 * The list: the newest tasks, asked for again and again, and older ones, page by page. Rows stay
 * where they are and take new values; tasks that came meanwhile are `fresh`.
 */
function useTasks(filter) {
  const key = toQuery(filter);
  const head = useData("tasks", { ...filter, limit: PAGE });
  const [list, set] = useState({ key: null });
  const busy = useRef("");
  useEffect(() => {
    if (!head.data) return;
    const { tasks, cursor, looked } = head.data;
    set((old) => {
      if (old.key !== key || old.over) {
        return { key, rows: tasks, cursor, looked, misses: 0, fresh: [] };
      }
      const values = new Map(tasks.map((one) => [one.uuid, one]));
      const rows = old.rows.map((one) => values.get(one.uuid) || one);
      const known = new Set(rows.map((one) => one.uuid));
      return { ...old, rows, fresh: tasks.filter((one) => !known.has(one.uuid)) };
    });
  }, [head.data]);
  const more = async () => {
    const { cursor } = list;
    if (busy.current === key + cursor || !cursor || list.misses >= STEPS) return;
    busy.current = key + cursor;
    const query = { ...filter, limit: PAGE, cursor };
    const page = await get("tasks", query).catch((error) => ({ error }));
    if (page.error) {
      set((old) => ({ ...old, error: page.error, misses: STEPS }));
      busy.current = "";
      return;
    }
    set((old) => {
      if (old.key !== key || old.cursor !== cursor) return old;
      const known = new Set(old.rows.map((one) => one.uuid));
      return {
        ...old,
        rows: [...old.rows, ...page.tasks.filter((one) => !known.has(one.uuid))],
        cursor: page.cursor,
        looked: old.looked + page.looked,
        misses: page.tasks.length ? 0 : old.misses + 1,
        error: null,
      };
    });
  };
  const shown = list.key === key;
  return {
    head,
    list: shown ? list : { rows: [], fresh: [], cursor: "?", looked: 0, misses: 0 },
    more: shown ? more : () => {},
    goOn: () => set((old) => ({ ...old, misses: 0 })),
    showFresh: () => set((old) => ({ ...old, rows: [...old.fresh, ...old.rows], fresh: [] })),
    reload: () => {
      set((old) => ({ ...old, over: true }));
      head.refresh();
    },
  };
}

function Filters({ filter, change }) {
  const { overview } = useLive();
  const search = useRef(null);
  const timer = useRef(0);
  useEffect(() => {
    // Not under the hands of somebody who types on.
    if (document.activeElement !== search.current) search.current.value = filter.text;
  }, [filter.text]);
  const find = () => {
    clearTimeout(timer.current);
    change({ text: search.current.value.trim() });
  };
  const later = () => {
    clearTimeout(timer.current);
    timer.current = setTimeout(find, TYPING);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const enter = ({ key }) => {
    if (key !== "Enter") return;
    const uuid = search.current.value.trim();
    if (/^(task|chord)_/.test(uuid)) location.hash = link("task", { uuid });
    else find();
  };
  const toggle = (state) => {
    const others = filter.state.filter((one) => one !== state);
    change({ state: filter.state.length > others.length ? others : [...others, state] });
  };
  const field = (key, label, known) => html`<label>${label}
    <input type="text" value=${filter[key]} list=${`known-${key}`} spellcheck=${false}
      onChange=${({ target }) => change({ [key]: target.value.trim() })} />
    <datalist id=${`known-${key}`}>${known.map((one) => html`<option value=${one} />`)}</datalist>
  </label>`;
  return html`<div class="filters" role="search">
    <label class="text">Search
      <input type="search" data-filter ref=${search} onInput=${later} onKeyDown=${enter}
        placeholder="arguments, results, errors, or task_…" spellcheck=${false} />
    </label>
    ${field("name", "Task", [])}
    ${field("queue", "Queue", overview?.queues.map((one) => one.queue) || [])}
    ${field("worker", "Worker", [])}
    <${Since} label="Changed within" value=${filter.since}
      change=${({ target }) => change({ since: target.value })} />
    <div class="chips" role="group" aria-label="States">
      ${STATES.map(
        (one) => html`<button type="button" class="chip" key=${one} onClick=${() => toggle(one)}
          aria-pressed=${filter.state.includes(one)}>${stateWord(one)}</button>`,
      )}
    </div>
  </div>`;
}

/** What became of a task so far: its error, its result, how far it is, or when it will run. */
function Outcome({ of: { state, error, error_type, result, progress, eta } }) {
  const failure = error_type ? `${error_type}: ${error}` : error;
  if (failure) return html`<span class="failed" title=${failure}>${failure}</span>`;
  if (state === "SUCCESS") return html`<code title=${result}>${result}</code>`;
  if (progress) return html`<${Progress} of=${progress} />`;
  return eta && !isFinished(state) ? html`due <${Time} at=${eta} />` : "";
}

const COLUMNS = [
  { head: "State", kind: "state-cell", cell: (one) => html`<${State} of=${one.state} />` },
  taskColumn,
  {
    head: "Arguments",
    kind: "call",
    cell: (one) => html`<code title=${one.args}>${one.args}</code>`,
  },
  { head: "Outcome", kind: "wide", cell: (one) => html`<${Outcome} of=${one} />` },
  text("Queue", "queue"),
  figure("Try", "attempt"),
  time("Sent", "created_at"),
  seconds("Took", (one) => between(one.started_at, one.finished_at)),
];

export function Tasks({ query }) {
  const filter = filterOf(query);
  const key = toQuery(filter);
  const { head, list, more, goOn, showFresh, reload } = useTasks(filter);
  const mayChange = useMayChange();
  const [chosen, setChosen] = useState(new Set());
  const box = useRef(null);
  const { rows, fresh, cursor, looked, misses, error } = list;
  const clear = () => setChosen(new Set());
  useEffect(clear, [key]);
  useEffect(() => {
    if (rows.length < PAGE) more(); // a rare find: the search goes on until the page is full
    // Nobody is about to press a row: new ones may push the others down.
    if (fresh.length && !chosen.size && scrollY < 50 && !isHeld(box.current)) showFresh();
  });
  const onDone = () => {
    clear();
    reload();
  };
  const all = key ? "All that match" : "All tasks";
  const scope = chosen.size ? `${number(chosen.size)} selected` : all;
  return html`<h1 tabindex="-1">Tasks</h1>
    <${Filters} filter=${filter}
      change=${(values) => location.replace(link("tasks", { ...filter, ...values }))} />
    <div class="bar">
      ${mayChange &&
      html`<${BulkBar} actions=${["tasks/retry", "tasks/revoke", "tasks/delete"]} scope=${scope}
        what=${chosen.size ? { ids: [...chosen], onDone } : { filter, onDone }} />`}
      ${chosen.size > 0 &&
      html`<button type="button" class="plain" onClick=${clear}>Clear selection</button>`}
      <span class="grow"></span>
      ${fresh.length > 0 &&
      html`<button type="button" class="primary" onClick=${showFresh}>
        Show ${fresh.length >= PAGE ? `${PAGE} or more` : fresh.length} newer</button>`}
      ${key && html`<a class="button" href="#/tasks">Clear filter</a>`}
    </div>
    <div ref=${box}>
      <${Instead} of=${head} empty=${!cursor && !rows.length}>
        ${key ? "No task matches this filter." : "No tasks yet. They appear when they are sent."}
      </${Instead}>
      ${rows.length > 0 &&
      html`<${Table} label="Tasks, the last changed first" kind="fixed" columns=${COLUMNS}
        rows=${rows} rowKey=${(one) => one.uuid} steady=${false} onEnd=${more}
        selection=${mayChange && { chosen, set: setChosen }} />`}
    </div>
    ${head.data && (rows.length > 0 || cursor) &&
    html`<p class="foot" role="status">
      ${plural(rows.length, "task")}
      ${cursor ? ` so far; ${number(looked)} looked at. ` : ": all of them."}
      ${error && html`<span class="failed">${error.message} </span>`}
      ${cursor &&
      misses >= STEPS &&
      html`<button type="button" onClick=${goOn}>Look further</button>`}
    </p>`}`;
}
