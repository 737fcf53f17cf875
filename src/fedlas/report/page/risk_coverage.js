// Risk-coverage curves of all models.
import { element, find, isolate, replaceContent } from "./dom.js";
import { formatPercent, formatResult, formatTick } from "./format.js";
import { showLines, zip } from "./line_chart.js";
import { currentModel, data, isCurrentModel } from "./page_state.js";
import { lineKey } from "./svg.js";

const COLOURS = 6;
const hidden = new Set(); // keys of the curves that are switched off

// The current model has a curve for each state; other models have one for their uncalibrated predictions.
function riskCurves() {
  const curves = [];
  data.models.forEach((model, modelIndex) => {
    model.states.forEach((state, stateIndex) => {
      if (!state.risk || (stateIndex > 0 && !isCurrentModel(modelIndex))) return;
      const stateName = stateIndex ? `after ${state.name}` : state.name;
      const name = data.models.length > 1 ? `${model.name}, ${stateName}` : stateName;
      curves.push({ key: `${modelIndex}/${stateIndex}`, name, risk: state.risk, kind: `line line-${curves.length % COLOURS}` });
    });
  });
  return curves;
}

function drawCurves() {
  const curves = riskCurves().filter(({ key }) => !hidden.has(key));
  const [uncalibrated] = currentModel().states;
  const uncalibratedRisk = uncalibrated.risk;
  const risks = curves.flatMap(({ risk }) => risk.risk.filter((_, index) => risk.coverage[index] >= 0.02));
  const top = Math.min(1, Math.max(0.001, ...risks, ...(uncalibratedRisk ? uncalibratedRisk.best : [])) * 1.08);
  const coverages = (curves[0]?.risk ?? uncalibratedRisk ?? { listed: [] }).listed.map(([coverage]) => coverage);
  const listed = (risk, coverage, column) => formatPercent(risk.listed[coverages.indexOf(coverage)][column]);
  showLines(find("risk-figure"), {
    title: "Risk (error rate) over coverage",
    caption: uncalibratedRisk ? `AURC ${formatResult(uncalibrated.results.aurc)}.` : "",
    label: "Risk over coverage",
    x: { from: 0, to: 1, text: formatTick, name: "coverage, most confident samples first" },
    y: { from: 0, to: top, text: formatTick, name: "risk" },
    curves: curves.map(({ kind, name, risk }) => [kind, zip(risk.coverage, risk.risk.map((value) => Math.min(value, top))), name]),
    guides: uncalibratedRisk ? [["best", zip(uncalibratedRisk.coverage, uncalibratedRisk.best)]] : [],
    marks: coverages,
    describe: (coverage) => [
      `coverage ${formatTick(coverage)}`,
      ...curves.map(({ name, risk }) => `${name}: risk ${listed(risk, coverage, 1)}`),
      ...(uncalibratedRisk ? [`best possible: ${listed(uncalibratedRisk, coverage, 2)}`] : []),
    ],
    legend: [...curves.map(({ kind, name }) => [lineKey(kind), name]), ...(uncalibratedRisk ? [[lineKey("best"), "best possible"]] : [])],
    rows: () => [
      ["Coverage", ...curves.map(({ name }) => name), "Best possible"],
      coverages.map((coverage) => [formatTick(coverage), ...curves.map(({ risk }) => listed(risk, coverage, 1)), uncalibratedRisk ? listed(uncalibratedRisk, coverage, 2) : "–"]),
    ],
  });
}

export function drawRiskCoverage() {
  const host = find("risk-lines");
  const labels = riskCurves().map(({ key, name, kind }) => {
    const input = element("input", { type: "checkbox", value: key, checked: !hidden.has(key) });
    input.addEventListener("change", () => {
      if (input.checked) hidden.delete(key);
      else hidden.add(key);
      drawCurves();
    });
    return element("label", {}, input, lineKey(kind), isolate(name));
  });
  replaceContent(host, host.querySelector("legend"), ...labels);
  drawCurves();
}
