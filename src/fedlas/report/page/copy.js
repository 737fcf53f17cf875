// Buttons that copy code to the clipboard. In some browsers, pages opened as files have no clipboard API; the code is
// selected instead, so that the reader can copy it.

async function copyCode(button, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    window.getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
}

export function setUpCopying() {
  for (const button of document.querySelectorAll("button.copy")) {
    const code = button.parentElement.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", () => copyCode(button, code));
    button.addEventListener("blur", () => {
      button.textContent = "Copy";
    });
  }
}
