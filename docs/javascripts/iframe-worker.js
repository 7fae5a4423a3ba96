// Search from the file system: browsers refuse workers there, so a hidden frame plays one.
// (The theme's own remedy is a script that it fetches from elsewhere; these pages fetch nothing.)
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        if (this.onmessage) this.onmessage(event);
      });
      this.ready = new Promise((done) => this.frame.addEventListener("load", done));
      const page = this.frame.contentWindow.document;
      page.open();
      page.write(
        "<!doctype html><body><script>postMessage = (message) => parent.postMessage(message, '*');" +
          "importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((next) => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = next;" +
          "document.body.append(script); })), Promise.resolve());<\/script>" +
          `<script src="${url}"><\/script>`,
      );
      page.close();
    }

    postMessage(message) {
      // Not the frame's postMessage: that one is the worker's own, and leads back here.
      const { contentWindow: frame } = this.frame;
      this.ready.then(() => frame.dispatchEvent(new MessageEvent("message", { data: message })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
