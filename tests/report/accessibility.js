// The main rules of accessibility; each returns the markup of the elements that break it.
() => {
  const text = (node) => (node?.textContent ?? "").trim();
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest("[aria-hidden=true], .hidden, .patterns");
  const all = (selector) => [...document.querySelectorAll(selector)].filter(isShown);
  const labelledby = (node) => (node.getAttribute("aria-labelledby") ?? "").split(/\s+/).map((id) => text(document.getElementById(id))).join("");
  const name = (node) => (node.getAttribute("aria-label") ?? "").trim() || labelledby(node);
  const rgb = (colour) => colour.match(/[\d.]+/g).map(Number);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const [red, green, blue, alpha = 1] = rgb(getComputedStyle(at).backgroundColor);
      if (alpha > 0) return [red, green, blue];
    }
    return [255, 255, 255];
  };
  const luminance = (colour) => {
    const [red, green, blue] = colour.slice(0, 3).map((value) => value / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (node) => {
    const [low, high] = [luminance(rgb(getComputedStyle(node).color)), luminance(ground(node))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  const levels = all("h1, h2, h3, h4, h5, h6");
  const level = (heading) => Number(heading.tagName[1]);
  const ids = [...document.querySelectorAll("[id]")];
  const broken = {
    labels: all("input, select, textarea").filter((node) => !name(node) && !text(node.labels?.[0])),
    buttons: all("button, a, summary").filter((node) => !name(node) && !text(node)),
    pictures: all("img").filter((node) => !node.getAttribute("alt")),
    drawings: all("main svg[role], main svg [role=img]").filter((node) => !name(node)),
    regions: all("[role=region], nav, form, section").filter((node) => !name(node)),
    groups: all("fieldset").filter((node) => !text(node.querySelector("legend"))),
    headings: levels.filter((node, at) => !text(node) || level(node) > (at ? level(levels[at - 1]) : 0) + 1),
    tables: all("table").filter((node) => node.tBodies[0]?.rows.length && !node.querySelector("thead th[scope=col]")),
    scrolling: all(".scroll, pre").filter((node) => node.tabIndex < 0),
    ids: ids.filter((node) => document.querySelectorAll(`#${CSS.escape(node.id)}`).length > 1),
    references: all("[aria-labelledby], [aria-describedby]").filter((node) =>
      ["aria-labelledby", "aria-describedby"].some((key) => node.hasAttribute(key) && !document.getElementById(node.getAttribute(key)))),
    contrast: all("body *").filter((node) => hasText(node) && !node.closest("svg") && !node.disabled && contrast(node) < 4.5),
    page: document.documentElement.lang && document.title && all("main").length === 1 && all("h1").length === 1 ? [] : [document.body],
  };
  return Object.fromEntries(Object.entries(broken).map(([rule, nodes]) => [rule, nodes.map((node) => node.outerHTML.slice(0, 200))]));
}
