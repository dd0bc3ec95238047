import { html } from "../preact.js";
import { post, useData, useMayChange } from "../api.js";
import { Action, Instead, Time } from "../parts.js";
import { actions, figure, Table, time } from "../table.js";

const COLUMNS = [
  {
    head: "Schedule",
    kind: "name",
    cell: (one) => html`<span>${one.name}</span>${" "}
      ${one.paused && html`<span class="badge">paused</span>`}
      ${!one.stored &&
      html`<span class="badge" title="No worker of this code has started yet.">new</span>`}`,
  },
  {
    head: "When",
    kind: "short",
    cell: (one) => html`<code>${one.spec}</code> <span class="muted">${one.tz}</span>`,
  },
  { head: "Tasks", kind: "wide", cell: (one) => one.tasks.join(", ") },
  time("Last", "last_run", "never"),
  {
    head: "Next",
    kind: "short",
    cell: (one) =>
      one.next_runs.map(
        (at, i) => html`<span key=${at}>${i > 0 && ", "}<${Time} at=${at} /></span>`,
      ),
  },
  figure("Sent", "sent"),
  figure("Missed", "missed"),
  figure("Left out", "held"),
];

export function Schedules() {
  const found = useData("schedules", {}, 3);
  const mayChange = useMayChange();
  const rows = found.data?.schedules || [];
  const buttons = (one) => {
    const verb = one.paused ? "Resume" : "Pause";
    const button = (word, path, label, done) => html`<${Action} label=${label} done=${done}
      run=${() => post(`schedules/${path}`, { name: one.name })}
      onDone=${found.refresh}>${word}</${Action}>`;
    return html`${button(verb, verb.toLowerCase(), `${verb} ${one.name}`, `${verb}d ${one.name}.`)}
      ${button("Run now", "run", `Run now: ${one.name}`, `Sent ${one.name}.`)}`;
  };
  return html`<h1 tabindex="-1">Schedules</h1>
    <${Instead} of=${found} empty=${!rows.length}>
      No schedules. Declare one with <code>@server.periodic</code>.</${Instead}>
    ${rows.length > 0 &&
    html`<${Table} label="Schedules" rows=${rows} rowKey=${(one) => one.name}
      columns=${mayChange ? [...COLUMNS, actions(buttons)] : COLUMNS} />`}`;
}
