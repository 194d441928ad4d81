// A page that is opened from a file may start no Worker, and the search of this manual is one. There it runs in a
// hidden frame instead, which knows its parent by the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html><body>";
      this.started = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const element = inside.document.createElement("script");
          element.src = script;
          element.onload = () => resolve(inside);
          inside.document.body.append(element);
        };
      });
      document.documentElement.append(frame);
    }

    async postMessage(data) {
      const inside = await this.started;
      inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
