import { html } from "../preact.js";
import { useData, useMayChange } from "../api.js";
import { openBulk } from "../bulk.js";
import { number, plural } from "../format.js";
import { Instead, link, Since, sum } from "../parts.js";
import { actions, figure, named, Table, text, time } from "../table.js";

const FIELDS = ["name", "queue", "since"];

export function Errors({ query }) {
  const values = Object.fromEntries(FIELDS.map((key) => [key, query.get(key) || ""]));
  const found = useData("errors", values);
  const mayChange = useMayChange();
  const { groups = [], looked = 0, complete = true } = found.data || {};
  const change = ({ target }) =>
    location.replace(link("errors", { ...values, [target.name]: target.value.trim() }));
  const filterOf = (one) =>
    ({ ...values, state: ["FAILURE"], name: one.name, text: one.error_type });
  const columns = [
    figure("Count", "count", (one) => link("tasks", filterOf(one))),
    named("Task", "name", (one) => link("tasks", filterOf(one))),
    text("Error", "error_type", "name"),
    {
      head: "Text of the last",
      kind: "wide",
      cell: (one) => html`<a class="quiet" href=${link("task", { uuid: one.uuid })}>
        ${one.error || "none"}</a>`,
    },
    time("First", "first"),
    time("Last", "last"),
  ];
  const retry = (one) => openBulk("tasks/retry", { filter: filterOf(one), onDone: found.refresh });
  const buttons = (one) => html`<button type="button" onClick=${() => retry(one)}
    aria-label=${`Retry all ${one.name}, ${one.error_type}`}>Retry all …</button>`;
  const field = (name, label) => html`<label>${label}
    <input type="text" name=${name} data-filter value=${values[name]} onChange=${change} />
  </label>`;
  return html`<h1 tabindex="-1">Errors</h1>
    <div class="filters" role="search">
      ${field("name", "Task")} ${field("queue", "Queue")}
      <${Since} label="Failed within" value=${values.since} change=${change} />
    </div>
    <${Instead} of=${found} empty=${!groups.length}>
      No failed task${Object.values(values).some(Boolean) && " matches this filter"}.</${Instead}>
    ${groups.length > 0 &&
    html`<p class="foot">
        ${plural(sum(groups, "count"), "failure")} of ${plural(groups.length, "kind")}.
        ${!complete && ` The newest ${number(looked)} were looked at; there are more.`}
      </p>
      <${Table} label="Failures by task and type of error" rows=${groups}
        rowKey=${(one) => `${one.name} ${one.error_type}`}
        columns=${mayChange ? [...columns, actions(buttons)] : columns} />`}`;
}
