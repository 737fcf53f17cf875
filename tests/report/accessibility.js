// Rules of accessibility that axe-core does not have; each returns the markup of the elements that break it.
() => {
  const text = (node) => (node?.textContent ?? "").trim();
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true }) && !node.closest("[aria-hidden=true], .hidden, .patterns");
  const all = (selector) => [...document.querySelectorAll(selector)].filter(isShown);
  const labelledby = (node) => (node.getAttribute("aria-labelledby") ?? "").split(/\s+/).map((id) => text(document.getElementById(id))).join("");
  const name = (node) => (node.getAttribute("aria-label") ?? "").trim() || labelledby(node);
  const ids = [...document.querySelectorAll("[id]")];
  const broken = {
    drawings: all("main svg[role], main svg [role=img]").filter((node) => !name(node)),
    regions: all("[role=region], [role=group], nav, form, section").filter((node) => !name(node)),
    groups: all("fieldset").filter((node) => !text(node.querySelector("legend"))),
    tables: all("table").filter((node) => node.tBodies[0]?.rows.length && !node.querySelector("thead th[scope=col]")),
    scopes: all("th:not([scope])"),
    scrolling: all(".scroll, pre").filter((node) => node.tabIndex < 0),
    ids: ids.filter((node) => document.querySelectorAll(`#${CSS.escape(node.id)}`).length > 1),
    references: all("[aria-labelledby], [aria-describedby]").filter((node) =>
      ["aria-labelledby", "aria-describedby"].some((key) => node.hasAttribute(key) && !document.getElementById(node.getAttribute(key)))),
    landmarks: ["header", "nav", "main", "footer", "h1"].every((tag) => all(tag).length === 1) ? [] : [document.body],
  };
  return Object.fromEntries(Object.entries(broken).map(([rule, nodes]) => [rule, nodes.map((node) => node.outerHTML.slice(0, 200))]));
}
