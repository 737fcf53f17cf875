// Training curves: metrics by epoch, gate statistics, and smoothing strengths of a loss with feedback.
import { find, replaceContent, showSection } from "./dom.js";
import { formatPercent, formatSignificant, formatTick } from "./format.js";
import { showLines, zip } from "./line_chart.js";
import { currentModel } from "./page_state.js";
import { boxKey, lineKey, svg } from "./svg.js";

const HOSTS = ["training-curves", "training-gate", "training-ratio", "training-alpha"];
const FEEDBACK_CURVES = 5;

// Draw curves [css class, values, name] over the epochs; missing values are null.
function showEpochs(id, epochs, { title, caption = "", curves, axis = null, isPercent = true, guide = null }) {
  const format = isPercent ? formatPercent : (value) => formatSignificant(value);
  const values = curves.flatMap(([, column]) => column.map((value) => value ?? 0));
  const every = Math.ceil(epochs.length / 24);
  const x = { from: epochs[0], to: Math.max(epochs[0] + 1, epochs.at(-1)), text: (value) => (Number.isInteger(value) ? String(value) : ""), name: "epoch" };
  const y = { from: Math.min(0, ...values) * 1.05, to: Math.max(0.01, guide ?? 0, ...values) * 1.05, text: isPercent ? formatTick : format, name: axis };
  const guideKeys = guide === null ? [] : [[lineKey("ideal"), format(guide)]];
  showLines(find(id), {
    title, caption, x, y,
    label: `${title} over epochs`,
    curves: curves.map(([kind, column, name]) => [kind, zip(epochs, column), name]),
    guides: guide === null ? [] : [["ideal", [[x.from, guide], [x.to, guide]]]],
    marks: epochs.filter((_, index) => index % every === 0 || index === epochs.length - 1),
    describe: (epoch, nearest) => [`epoch ${epoch}`, ...nearest.map(([name, point]) => `${name} ${format(point[1])}`)],
    legend: [...curves.map(([kind, , name]) => [lineKey(kind), name]), ...guideKeys],
    rows: () => [
      ["Epoch", ...curves.map(([, , name]) => name)],
      epochs.map((epoch, index) => [epoch, ...curves.map(([, column]) => (column[index] === null ? "–" : format(column[index])))]),
    ],
  });
}

// Smoothing strengths of a loss with feedback, and the calibration gaps that determine them, for at most five bins.
function drawFeedback(epochs, { strengths, gaps }) {
  const bins = strengths[0].length;
  const steps = Array.from({ length: FEEDBACK_CURVES }, (_, index) => Math.round((index * (bins - 1)) / (FEEDBACK_CURVES - 1)));
  const name = (bin) => (bins === 1 ? "all samples" : `bin ${bin + 1} of ${bins}`);
  const curves = (rows) => [...new Set(steps)].map((bin, index) => [`line line-${index}`, rows.map((row) => row[bin]), name(bin)]);
  showEpochs("training-gate", epochs, {
    title: "Smoothing strength",
    caption: "Weight of the previous prediction in the target, by bin from low to high values of the indicator.",
    curves: curves(strengths), axis: "strength",
  });
  showEpochs("training-ratio", epochs, {
    title: "Calibration gap",
    caption: "Mean confidence minus accuracy of each bin on held-out data. Above zero: over-confident; the strength of the bin is raised.",
    curves: curves(gaps), axis: "confidence − accuracy",
  });
}

function drawGate(epochs, gate) {
  showEpochs("training-gate", epochs, {
    title: "Gate",
    caption: "A gate that is nearly always against the sign of γ only lowers the training loss.",
    curves: [
      ["line line-0", gate.positive, "gate at +1"],
      ["line line-1", gate.flip_rate, "flip rate since the previous epoch"],
      ["line line-2", gate.against_gamma, "against the sign of γ"],
    ],
  });
  showEpochs("training-ratio", epochs, {
    title: "Mean smoothing",
    caption: "Mean of αᵢ over the samples of an epoch, as a multiple of α; label smoothing alone is 1.",
    curves: [["line line-3", gate.alpha_ratio, "mean αᵢ / α"]], axis: "mean αᵢ / α", isPercent: false, guide: 1,
  });
}

// Smoothing as a function of the indicator, with the histogram of the indicator in the last epoch.
function drawSmoothing({ edges, ends, centres, fractions, at_centres: ratios, curve }, beta) {
  const curves = beta === null ? [] : [1, 2].map((mode) => [`line line-${mode - 1}`, curve.map((row) => [row[0], row[mode]]), `αᵢ / α, gate at ${mode === 1 ? "+1" : "−1"}`]);
  const ratio = (bin, mode) => formatSignificant(ratios[bin][mode]);
  const most = Math.max(...fractions) || 1;
  // The outermost bins hold all values beyond the edges.
  const range = (bin) => {
    if (bin === 0) return `γ below ${formatSignificant(edges[0])}`;
    return bin === centres.length - 1 ? `γ from ${formatSignificant(edges.at(-1))}` : `γ ${formatSignificant(ends[bin])} to ${formatSignificant(ends[bin + 1])}`;
  };
  showLines(find("training-alpha"), {
    title: "Smoothing over the indicator",
    caption: `Bars: histogram of γ in the last epoch.${beta === null ? "" : ` Lines: αᵢ as a multiple of α, with β = ${formatSignificant(beta)}.`}`,
    label: "Smoothing over gamma, and the histogram of gamma",
    x: { from: ends[0], to: ends.at(-1), text: (value) => formatSignificant(value), name: "γ" },
    y: { from: 0, to: 2, text: (value) => (beta === null ? "" : formatSignificant(value)), name: beta === null ? null : "αᵢ / α" },
    curves,
    marks: centres,
    background: (root, area, x) => {
      fractions.forEach((fraction, bin) => {
        const height = (fraction / most) * area.height * 0.95;
        const left = x(ends[bin]) + 0.5;
        root.append(svg("rect", { class: "density", x: left, width: Math.max(1, x(ends[bin + 1]) - left - 0.5), y: area.bottom - height, height }));
      });
    },
    describe: (centre) => {
      const bin = centres.indexOf(centre);
      const both = beta === null ? [] : [`αᵢ / α ${ratio(bin, 1)} at +1, ${ratio(bin, 2)} at −1`];
      return [range(bin), `${formatPercent(fractions[bin])} of the samples`, ...both];
    },
    legend: [[boxKey({ class: "density" }), "fraction of samples"], ...curves.map(([kind, , name]) => [lineKey(kind), name])],
    rows: () => [
      ["γ", "Fraction of samples", ...(beta === null ? [] : ["αᵢ / α at +1", "αᵢ / α at −1"])],
      fractions.map((fraction, bin) => [range(bin), formatPercent(fraction), ...(beta === null ? [] : [ratio(bin, 1), ratio(bin, 2)])]),
    ],
  });
}

export function drawTraining() {
  const { training } = currentModel();
  showSection(find("training"), training, "This model has no training log.");
  for (const id of HOSTS) replaceContent(find(id));
  if (!training) return;
  const { epoch: epochs, gate, feedback } = training;
  showEpochs("training-curves", epochs, {
    title: "Validation",
    curves: [["line line-2", training.accuracy, "accuracy"], ["line line-1", training.ece, "ECE"]],
  });
  if (feedback) drawFeedback(epochs, feedback);
  if (gate) drawGate(epochs, gate);
  if (gate?.gamma) drawSmoothing(gate.gamma, training.beta);
}
