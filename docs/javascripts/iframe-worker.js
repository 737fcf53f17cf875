// Lets the search box work when pages are opened from disk: browsers do not start web workers from file://, so the
// worker's script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.started = new Promise((resolve) => { script.onload = resolve; });
      script.src = url;
      inside.document.body.append(script);
      this.frame = frame;
      this.addEventListener("message", (event) => this.onmessage?.(event));
    }

    async postMessage(data) {
      await this.started;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
