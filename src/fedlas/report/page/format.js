// Numbers as text: the only module of the page that rounds. `formatting.py` has the same rules and explains them.

const PERCENT_DECIMALS = 2;
const PLAIN_DECIMALS = 3;
const MOST_DECIMALS = 8;
const LARGE = 1e6;
const SMALLEST_P = 0.001;
const PERCENT = "\u00a0%"; // kept on one line with its number

export function decimalsOf(low = null, high = null, isPercent = true) {
  const halfWidth = low === null || high === null ? 0 : ((high - low) / 2) * (isPercent ? 100 : 1);
  if (!(halfWidth > 0 && halfWidth < Infinity)) return isPercent ? PERCENT_DECIMALS : PLAIN_DECIMALS;
  const exponent = Number(halfWidth.toExponential(1).split("e")[1]);
  return Math.min(MOST_DECIMALS, Math.max(0, 1 - exponent));
}

// Ties are rounded to even, as in Python; `toFixed` rounds them up.
export function formatFixed(value, digits) {
  const exact = value.toFixed(digits + 40);
  const cut = exact.length - 40;
  const truncated = exact.slice(0, cut).replace(/\.$/, "");
  const isTie = /^50*$/.test(exact.slice(cut)) && Number(truncated.at(-1)) % 2 === 0;
  const text = isTie ? truncated : value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text;
}

export function formatSigned(value, digits) {
  const text = formatFixed(value, digits);
  return text.startsWith("-") ? `−${text.slice(1)}` : `+${text}`;
}

function formatScaled(value, digits, isPercent) {
  const scaled = isPercent ? 100 * value : value;
  if (Math.abs(scaled) < LARGE) return formatFixed(scaled, digits);
  const exponent = Number(scaled.toExponential(3).split("e")[1]);
  const mantissa = Number(formatFixed(scaled / 10 ** (exponent - 3), 0)) / 1000;
  return `${mantissa}e+${String(exponent).padStart(2, "0")}`;
}

export function formatNumber(value, low = null, high = null, isPercent = true) {
  return formatScaled(value, decimalsOf(low, high, isPercent), isPercent);
}

export function formatCell(value, low = null, high = null, isPercent = true) {
  const digits = decimalsOf(low, high, isPercent);
  const ends = low === null || high === null ? [] : [low, high].map((end) => formatScaled(end, digits, isPercent));
  return formatScaled(value, digits, isPercent) + (ends.length ? ` [${ends.join(", ")}]` : "");
}

export function formatPercent(fraction, low = null, high = null) {
  return formatNumber(fraction, low, high) + PERCENT;
}

export function formatInterval(low, high) {
  return `${formatNumber(low, low, high)} to ${formatPercent(high, low, high)}`;
}

export function formatProbability(fraction) {
  if (fraction > 0.9999) return `> 99.99${PERCENT}`;
  if (fraction < 0.0001) return `< 0.01${PERCENT}`;
  return formatFixed(100 * fraction, fraction > 0.99 || fraction < 0.01 ? 2 : 1) + PERCENT;
}

export function formatCount(value) {
  const isWhole = Number.isInteger(Number(formatFixed(value, 1)));
  return formatFixed(value, isWhole ? 0 : 1).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

export function formatSignificant(value, digits = 3) {
  if (value === 0) return "0";
  const exponent = Number(value.toExponential(digits - 1).split("e")[1]);
  const decimals = Math.min(60, digits - 1 - exponent);
  if (decimals < 0) return formatFixed(value / 10 ** -decimals, 0) + "0".repeat(-decimals);
  const text = formatFixed(value, decimals);
  return decimals ? text.replace(/\.?0+$/, "") : text;
}

export function formatEdge(value) {
  return formatSignificant(value, value > 0.99 ? 5 : 3);
}

export function formatPValue(value, isBound = false) {
  if (value < SMALLEST_P || (isBound && value < 1)) {
    return `p < ${formatFixed(Math.max(SMALLEST_P, Math.ceil(1000 * value) / 1000), 3)}`;
  }
  return `p = ${formatFixed(value, 3)}`;
}

export function formatLevel(value) {
  return formatSignificant(100 * value, 4) + PERCENT;
}

// Formats that only the page uses

export const formatRange = (lower, upper) => `${formatEdge(lower)} to ${formatEdge(upper)}`;

export const formatTick = (fraction) => `${formatSignificant(100 * fraction)}${PERCENT}`;

export const formatTenth = (value) => formatFixed(value, 1);

export const formatSamples = (number) => `${formatCount(number)} ${number === 1 ? "sample" : "samples"}`;

export function formatResult({ value, low, high, percent }) {
  if (value === null) return "";
  const unit = percent ? PERCENT : "";
  return `${formatNumber(value, low, high, percent)}${unit}${formatCell(value, low, high, percent).replace(/^[^ ]*/, "")}`;
}

// The gap of confidence and accuracy in points, with the decimals of the accuracy.
export function formatGap(gap, low, high) {
  const size = formatNumber(Math.abs(gap), low, high);
  if (Number(size) === 0) return "no gap";
  return `${size} points ${gap > 0 ? "over-confident" : "under-confident"}`;
}

export function formatAxisCount(number) {
  if (number >= 1e6) return `${formatSignificant(number / 1e6)}M`;
  return number >= 1e4 ? `${formatFixed(number / 1e3, 0)}k` : formatCount(number);
}
