// One panel, drawn by Grafana's own components; state timelines, which are not among those, by a few boxes.
import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  createTheme,
  dateTime,
  FieldType,
  getDisplayProcessor,
  getFieldDisplayName,
  getFieldDisplayValues,
  Registry,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from "@grafana/data";
import { BigValue, TimeSeries, VizRepeater } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";
import { firstValueFrom } from "rxjs";
import { fill, frames, FROM, problems, THEME, TO } from "./prometheus.js";

export const theme = createTheme({ colors: { mode: THEME } });
const [from, to] = [dateTime(1000 * FROM), dateTime(1000 * TO)];
const timeRange = { from, to, raw: { from, to } };
const NAMES = 220; // pixels, of a state timeline's names

standardTransformersRegistry.setInit(() => {
  const byId = new Map(Object.values(standardTransformers).map((each) => [each.id, each]));
  return [...byId.values()].map((transformation) => ({ id: transformation.id, name: transformation.name, transformation }));
});

// What fields may be configured by, as Grafana's editor would register it.
const STANDARD = ["unit", "min", "max", "decimals", "mappings", "thresholds", "color", "links", "noValue"];

function registry({ defaults, overrides }) {
  const custom = Object.keys(defaults.custom ?? {}).map((name) => `custom.${name}`);
  const ids = overrides.flatMap(({ properties }) => properties.map(({ id }) => id));
  const unknown = ids.filter((id) => !STANDARD.includes(id) && !id.startsWith("custom."));
  problems.push(...unknown.map((id) => `unknown property ${id}`));
  return new Registry(() =>
    [...new Set([...STANDARD, ...custom, ...ids])].map((id) => {
      const isCustom = id.startsWith("custom.");
      const path = isCustom ? id.slice("custom.".length) : id;
      return { id, path, isCustom, name: id, process: (value) => value, shouldApply: () => true };
    }),
  );
}

// JSON has no infinity: the first threshold is null there.
function withInfinity(value) {
  if (Array.isArray(value)) return value.map(withInfinity);
  if (value === null || typeof value !== "object") return value;
  const copy = Object.fromEntries(Object.entries(value).map(([key, each]) => [key, withInfinity(each)]));
  if (copy.mode === "absolute") copy.steps[0].value = -Infinity;
  return copy;
}

export async function load(panel, variables) {
  const text = (written) => fill(written, variables, true);
  const fieldConfig = withInfinity(panel.fieldConfig);
  const data = await firstValueFrom(
    transformDataFrame(panel.transformations, await frames(panel, variables), { interpolate: text }),
  );
  const fieldConfigRegistry = registry(fieldConfig);
  const drawn = applyFieldOverrides({ data, fieldConfig, fieldConfigRegistry, replaceVariables: text, theme });
  cacheFieldDisplayNames(drawn);
  return drawn;
}

export function Drawn({ panel, data, width, height }) {
  if (!data.some((frame) => frame.length)) return <Empty text={panel.fieldConfig.defaults.noValue} height={height} />;
  const Kind = { timeseries: Lines, stat: Stat, table: Table, "state-timeline": States }[panel.type];
  return <Kind options={panel.options} data={data} width={width} height={height} />;
}

function Empty({ text, height }) {
  const color = theme.colors.text.secondary;
  return <div style={{ height, color, display: "grid", placeItems: "center", textAlign: "center" }}>{text}</div>;
}

const LINE = {
  axisPlacement: "auto",
  hideFrom: { viz: false, legend: false, tooltip: false },
  lineInterpolation: "linear",
  pointSize: 5,
  scaleDistribution: { type: "linear" },
  spanNulls: false,
  stacking: { group: "A", mode: "none" },
  thresholdsStyle: { mode: "off" },
};

function Lines({ options, data, width, height }) {
  for (const field of data.flatMap((frame) => frame.fields)) {
    if (field.type === FieldType.number) field.config.custom = { ...LINE, ...field.config.custom };
    field.display = getDisplayProcessor({ field, theme });
  }
  const { legend } = options;
  return <TimeSeries {...{ width, height, legend, timeRange }} frames={data} structureRev={1} timeZone="utc" />;
}

function Stat({ options, data, width, height }) {
  const fieldConfig = { defaults: {}, overrides: [] };
  const { reduceOptions, orientation, ...looks } = options;
  const values = getFieldDisplayValues({ data, fieldConfig, reduceOptions, replaceVariables: String, theme });
  const draw = ({ value, width, height }) => (
    <BigValue
      {...{ ...looks, width, height, theme }}
      value={value.display}
      count={values.length}
      disableWideLayout={!looks.wideLayout}
    />
  );
  return (
    <VizRepeater
      {...{ width, height, orientation }}
      source={values}
      getValues={() => values}
      itemSpacing={8}
      renderValue={draw}
    />
  );
}

function Table({ options, data, width, height }) {
  const { cellHeight } = options;
  return <TableNG {...{ width, height, cellHeight, timeRange }} data={data[0]} structureRev={1} getActions={() => []} />;
}

function States({ data, width, height }) {
  const lines = data.flatMap((frame) =>
    frame.fields
      .filter((field) => field.type === FieldType.number)
      .map((field) => ({ name: getFieldDisplayName(field, frame, data), field })),
  );
  const tall = Math.max(8, Math.min(28, (height - 18) / lines.length));
  return lines.map(({ name, field }) => (
    <div key={name} style={{ display: "flex", height: tall, alignItems: "center", fontSize: 11 }}>
      <div style={{ width: NAMES, whiteSpace: "nowrap", overflow: "hidden" }}>{name}</div>
      <div style={{ display: "flex", width: width - NAMES, height: 0.8 * tall }}>
        {stretches(field.values).map(([value, length], number) => (
          <div key={number} style={{ flexGrow: length, background: value === null ? "" : color(field, value) }} />
        ))}
      </div>
    </div>
  ));
}

const color = (field, value) => theme.visualization.getColorByName(field.display(value).color);

// Values that follow each other and are the same, as one with their number.
function stretches(values) {
  const found = [];
  for (const value of values) {
    if (found.length && found.at(-1)[0] === value) found.at(-1)[1] += 1;
    else found.push([value, 1]);
  }
  return found;
}
