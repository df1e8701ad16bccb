// A classic dashboard as Grafana would lay it out, without Grafana: `window.dashboard` is its JSON.
import { ThemeContext } from "@grafana/data";
import { GlobalStyles, PanelChrome } from "@grafana/ui";
import { Component } from "react";
import { createRoot } from "react-dom/client";
import { Drawn, load, theme } from "./panels.jsx";
import { fill, FROM, problems, resolve, TO } from "./prometheus.js";

const WIDTH = 1600;
const [COLUMN, LINE, GAP] = [WIDTH / 24, 38, 8]; // pixels
const [SETTLE, PATIENCE] = [3000, 60000]; // milliseconds that charts take to find their size, and tables at most

class Boundary extends Component {
  state = {};
  static getDerivedStateFromError(error) {
    return { error };
  }
  componentDidCatch(error) {
    problems.push(`panel "${this.props.title}": ${error.message}`);
  }
  render() {
    return this.state.error ? <pre>{this.state.error.message}</pre> : this.props.children;
  }
}

// Panels and headings with their place, a row that repeats once for each value of its variable.
function* places(panels, variables) {
  const groups = [{ panels: [] }];
  for (const panel of panels.toSorted((one, other) => one.gridPos.y - other.gridPos.y)) {
    if (panel.type === "row") groups.push({ row: panel, panels: [] });
    else groups.at(-1).panels.push(panel);
  }
  let y = 0;
  for (const { row, panels } of groups) {
    const variable = variables[row?.repeat];
    const first = Math.min(...panels.map(({ gridPos }) => gridPos.y));
    const height = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h)) - first;
    for (const value of variable ? (variable.values ?? variable.options) : [null]) {
      const own = value === null ? variables : { ...variables, [row.repeat]: { ...variable, values: [value] } };
      if (row) yield { heading: fill(row.title, own, true), y: y++ };
      for (const panel of panels) yield { panel, variables: own, place: { ...panel.gridPos, y: y + panel.gridPos.y - first } };
      y += height;
    }
  }
}

const hasRows = (panel, data) => panel.type === "table" && data.some((frame) => frame.length);

function Cell({ heading, y, panel, place, data }) {
  if (heading) return <div style={{ position: "absolute", top: LINE * y + GAP, fontWeight: 500 }}>⌄ {heading}</div>;
  const [width, height] = [COLUMN * place.w - GAP, LINE * place.h - GAP];
  return (
    <div
      className={hasRows(panel, data) ? "awaited" : ""}
      style={{ position: "absolute", left: COLUMN * place.x, top: LINE * place.y, width, height }}
    >
      <PanelChrome {...{ width, height, title: panel.title, description: panel.description }}>
        {(width, height) => (
          <Boundary title={panel.title}>
            <Drawn {...{ panel, data, width, height }} />
          </Boundary>
        )}
      </PanelChrome>
    </div>
  );
}

function Page({ dashboard, variables, cells }) {
  const { colors, typography } = theme;
  const style = { background: colors.background.canvas, color: colors.text.primary, fontFamily: typography.fontFamily };
  const time = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ");
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles isExtensionSidebarOpen={false} />
      <div style={{ ...style, padding: GAP, width: WIDTH, minHeight: "100vh" }}>
        <h3 style={{ margin: "0 0 4px" }}>{dashboard.title}</h3>
        <div style={{ fontSize: 12, marginBottom: GAP }}>
          {dashboard.templating.list.filter(({ hide }) => !hide).map(({ name, label }) => (
            <span key={name} style={{ marginRight: 12 }}>
              <b>{label}</b> {fill(`$${name}`, variables, true)}
            </span>
          ))}
          {time(FROM)} to {time(TO)}
        </div>
        <div style={{ position: "relative" }}>
          {cells.map((cell, number) => (
            <Cell key={number} {...cell} />
          ))}
        </div>
      </div>
    </ThemeContext.Provider>
  );
}

async function draw(dashboard) {
  const variables = await resolve(dashboard.templating.list);
  const cells = [...places(dashboard.panels, variables)];
  await Promise.all(cells.filter(({ panel }) => panel).map(async (cell) => (cell.data = await load(cell.panel, cell.variables))));
  createRoot(document.getElementById("root")).render(<Page {...{ dashboard, variables, cells }} />);
  await wait(SETTLE);
  // Under load a table may take longer to find its size, and shows nothing until then.
  const due = cells.filter(({ panel, data }) => panel && hasRows(panel, data)).length;
  const drawn = () => document.querySelectorAll('.awaited:has([role="gridcell"])').length === due;
  for (let waited = 0; !drawn() && waited < PATIENCE; waited += SETTLE) await wait(SETTLE);
  if (!drawn()) problems.push("a table with rows is not drawn");
}

const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

draw(window.dashboard)
  .catch((error) => problems.push(error.stack))
  .finally(() => (window.drawn = true));
