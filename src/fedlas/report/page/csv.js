// Tables as CSV text, with numbers at full precision.

const FORMULA = /^[=+@\t\r-]/; // a spreadsheet would execute a cell that starts like this
const SPECIAL = ['"', ",", "\n", "\r"];

function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const text = FORMULA.test(value) && !Number.isFinite(Number(value)) ? `'${value}` : value;
  const isQuoted = SPECIAL.some((character) => text.includes(character));
  return isQuoted ? ['"', text.replaceAll('"', '""'), '"'].join("") : text;
}

export const csvText = (head, rows) => [head, ...rows].map((row) => `${row.map(csvCell).join(",")}\r\n`).join("");
