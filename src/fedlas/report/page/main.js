// Draws all sections of the page and connects its controls.
import { drawClassMap, setUpClassMap } from "./class_map.js";
import { drawClasses, setUpClasses } from "./classes.js";
import { drawComparison } from "./comparison.js";
import { drawConfidences, setUpConfidences } from "./confidence.js";
import { drawConfusions } from "./confusions.js";
import { setUpCopying } from "./copy.js";
import { find, onEvent, showSection } from "./dom.js";
import { setUpDownloads } from "./download.js";
import { drawFeatureNorms } from "./feature_norms.js";
import { drawOod, setUpOod } from "./ood.js";
import { currentModel, selectModel } from "./page_state.js";
import { drawReliability, setUpReliability } from "./reliability.js";
import { drawRiskCoverage } from "./risk_coverage.js";
import { drawSamples, setUpSamples } from "./samples.js";
import { drawSlices } from "./slices.js";
import { drawTraining } from "./training.js";

function drawClassSections() {
  const hasClasses = Boolean(currentModel().class_table);
  for (const id of ["classes", "map"]) showSection(find(id), hasClasses, "This report has no predictions of this model.");
  if (!hasClasses) return;
  drawClasses();
  drawClassMap();
}

// Functions that draw the sections of the current model, by element id; sections without data of any model are missing.
const SECTIONS = {
  reliability: drawReliability,
  confidences: drawConfidences,
  slices: drawSlices,
  classes: drawClassSections,
  confusions: drawConfusions,
  selective: drawRiskCoverage,
  ood: drawOod,
  norms: drawFeatureNorms,
  training: drawTraining,
  samples: drawSamples,
};

function drawModel() {
  for (const [id, draw] of Object.entries(SECTIONS)) {
    if (find(id)) draw();
  }
}

function setUpControls() {
  for (const setUp of [setUpReliability, setUpConfidences, setUpClasses, setUpClassMap, setUpOod, setUpSamples]) setUp();
  onEvent("model", "change", (select) => {
    selectModel(Number(select.value));
    drawModel();
  });
  onEvent("theme", "change", (select) => {
    if (select.value === "auto") document.documentElement.removeAttribute("data-theme");
    else document.documentElement.setAttribute("data-theme", select.value);
  });
}

// The list of sections is collapsed in narrow windows; in wide windows it is next to the content.
function setUpNavigation() {
  const narrow = window.matchMedia("(max-width: 63.99rem)");
  const fold = () => {
    find("contents").open = !narrow.matches;
  };
  narrow.addEventListener("change", fold);
  fold();
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id).setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const section of document.querySelectorAll("main > section")) observer.observe(section);
}

// Collapsed parts are printed too, except the tables of figures.
function setUpPrinting() {
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not(.as-table)")) details.open = true;
  });
}

setUpNavigation();
setUpPrinting();
setUpControls();
setUpCopying();
setUpDownloads();
if (find("comparison")) drawComparison();
drawModel();
document.documentElement.dataset.ready = "true";
