import { html, useState } from "../preact.js";
import { useData, useLive, useMayChange } from "../api.js";
import { openBulk } from "../bulk.js";
import { Chart, series, Spark } from "../chart.js";
import { duration, number } from "../format.js";
import { Instead, link, sum } from "../parts.js";
import { figure, named, Table, text, time } from "../table.js";
import { COUNTS } from "./queues.js";

const HOUR = "3600"; // seconds
const STEP = 60;

const Tile = ({ name, value, note, href, bad }) => html`<li>
  <a class=${bad ? "tile bad" : "tile"} href=${href}>
    <span class="name">${name}</span><strong>${number(value)}</strong>
    <span class="note">${note}</span>
  </a>
</li>`;

function Tiles({ overview: { queues, workers } }) {
  const oldest = Math.max(0, ...queues.map((one) => one.oldest));
  const [failed, dead] = [sum(queues, "failed"), sum(queues, "dead")];
  const tasks = (...state) => link("tasks", { state });
  return html`<ul class="tiles">
    <${Tile} name="Waiting" value=${sum(queues, "waiting")} href="#/queues"
      note=${oldest ? `oldest ${duration(oldest)}` : "nothing waits"} />
    <${Tile} name="Held" value=${sum(queues, "running")} note="running or prefetched"
      href=${tasks("RECEIVED", "STARTED")} />
    <${Tile} name="Delayed" value=${sum(queues, "delayed")} note="for a later time"
      href=${tasks("PENDING", "RETRY")} />
    <${Tile} name="Ended" value=${sum(queues, "per_minute")} note="last minute"
      href=${tasks("SUCCESS", "FAILURE")} />
    <${Tile} name="Failed" value=${failed} note="still kept" bad=${failed}
      href=${tasks("FAILURE")} />
    <${Tile} name="Dead letters" value=${dead} bad=${dead} href="#/dead"
      note=${dead ? "need a decision" : "none"} />
    <${Tile} name="Workers" value=${workers.alive} href="#/workers"
      note=${workers.stalled ? `${workers.stalled} stalled` : "alive"}
      bad=${workers.stalled || !workers.alive} />
  </ul>`;
}

const FAILURES = [
  figure("Count", "count"),
  named("Task", "name", (one) =>
    link("tasks", { state: "FAILURE", name: one.name, text: one.error_type, since: HOUR }),
  ),
  text("Error", "error_type", "name"),
  text("Text of the last", "error", "wide"),
  time("Last", "last"),
];

function Failures() {
  const mayChange = useMayChange();
  const found = useData("errors", { since: HOUR }, 10);
  const groups = found.data?.groups || [];
  const retry = () =>
    openBulk("tasks/retry", { filter: { since: HOUR }, onDone: found.refresh });
  return html`<section>
    <header>
      <h2>Failures of the last hour</h2>
      ${mayChange &&
      groups.length > 0 &&
      html`<button type="button" onClick=${retry}>Retry all …</button>`}
      <a href=${link("errors", { since: HOUR })}>All errors</a>
    </header>
    <${Instead} of=${found} empty=${!groups.length}>No task has failed.</${Instead}>
    ${groups.length > 0 &&
    html`<${Table} label="Failures of the last hour" columns=${FAILURES} rows=${groups.slice(0, 5)}
      rowKey=${(one) => `${one.name} ${one.error_type}`} />`}
  </section>`;
}

export function Overview() {
  const { overview: last, error } = useLive();
  const overview = last?.at ? last : null; // without a moment no store has been asked yet
  const trouble = error || (last?.trouble && { message: last.trouble, passes: true });
  const history = useData("history", { seconds: HOUR, step: STEP }, 10);
  const [queue, setQueue] = useState("");
  const counts = history.data?.counts || [];
  const queues = overview?.queues || [];
  const hour = (one) => {
    const [, succeeded, failed] = series(counts, STEP, one.queue);
    return html`<${Spark} values=${succeeded.map((value, i) => value + failed[i])} />`;
  };
  return html`<h1 tabindex="-1">Overview</h1>
    <${Instead} of=${{ data: overview, error: overview ? null : trouble }} />
    ${overview && html`<${Tiles} overview=${overview} />`}
    <section>
      <header>
        <h2>Tasks that ended, by minute</h2>
        <label>Queue <select value=${queue} onChange=${(event) => setQueue(event.target.value)}>
          <option value="">all</option>
          ${queues.map(({ queue: one }) => html`<option key=${one} value=${one}>${one}</option>`)}
        </select></label>
      </header>
      <${Instead} of=${history} />
      ${history.data && html`<${Chart} counts=${counts} queue=${queue} step=${STEP} />`}
    </section>
    <section>
      <header><h2>Queues</h2><a href="#/queues">Manage queues</a></header>
      ${overview &&
      html`<${Instead} of=${{ data: queues }} empty=${!queues.length}>
        No queue yet: one appears with its first task or worker.</${Instead}>`}
      ${queues.length > 0 &&
      html`<${Table} label="Queues" rows=${queues} rowKey=${(one) => one.queue}
        columns=${[...COUNTS, { head: "Last hour", kind: "sparks", cell: hour }]} />`}
    </section>
    <${Failures} />`;
}
