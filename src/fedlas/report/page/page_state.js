// The data of the page, and the current model.
import { element, find, isolate, replaceContent } from "./dom.js";

export const data = JSON.parse(find("page-data").textContent);

let modelIndex = 0;

export const currentModel = () => data.models[modelIndex];

export const isCurrentModel = (index) => index === modelIndex;

export function selectModel(index) {
  modelIndex = index;
}

export function className(index) {
  const { names } = currentModel();
  return names === null ? `class ${index}` : data.names[names][index];
}

export const stateTitle = (state) => (state.name === "uncalibrated" ? "Uncalibrated" : `After ${state.name}`);

// Radio buttons for the uncalibrated predictions and each calibrator
export function setStateChoice(host, group, selected, onChange) {
  const labels = currentModel().states.map((state, index) => {
    const input = element("input", { type: "radio", name: group, value: index, checked: index === selected });
    input.addEventListener("change", () => onChange(index));
    return element("label", {}, input, isolate(state.name === "uncalibrated" ? "uncalibrated" : `after ${state.name}`));
  });
  replaceContent(host, host.querySelector("legend"), ...labels);
}
