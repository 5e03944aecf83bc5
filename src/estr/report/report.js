"use strict";
(() => {
  const root = document.documentElement;
  const buttons = document.querySelectorAll("[data-set-theme]");
  const setTheme = (theme) => {
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.setTheme === theme)));
  };
  buttons.forEach((button) => button.addEventListener("click", () => setTheme(button.dataset.setTheme)));
  document.querySelector(".theme").hidden = false;

  const samples = document.getElementById("samples");
  const setColor = (mode) => {
    samples.dataset.color = mode;
    const input = samples.querySelector(`input[name="color"][value="${mode}"]`);
    if (input) input.checked = true;
  };
  samples.addEventListener("change", (event) => {
    if (event.target.name === "color") setColor(event.target.value);
  });

  // #theme=dark&color=kept, so that a link can name what to look at
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (["light", "dark"].includes(wanted.get("theme"))) setTheme(wanted.get("theme"));
  if (["probability", "entropy", "version", "kept"].includes(wanted.get("color"))) setColor(wanted.get("color"));

  const gates = JSON.parse(document.getElementById("gates").textContent);
  const detail = document.getElementById("detail");
  const columns = new WeakMap();
  const read = (box) => {
    if (!columns.has(box)) columns.set(box, JSON.parse(box.nextElementSibling.textContent));
    return columns.get(box);
  };
  const number = (value) => {
    if (value === null || !Number.isFinite(value)) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e4)) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  };
  const rows = (box, i) => {
    const c = read(box);
    const mu = c.mu[i], pi = c.pi[i], h = c.h[i];
    const seen = mu !== null && pi !== null;
    const delta = seen ? pi - mu : null;
    const eps = Number(box.dataset.eps), tau = Number(box.dataset.tau);
    const list = [
      ["token id · position", `${c.id[i]} · ${c.position[i]}`],
      ["probability μ, sampled", mu === null ? "–" : number(Math.exp(mu))],
      ["probability π, trained", pi === null ? "–" : number(Math.exp(pi))],
      ["δ = log π − log μ", number(delta)],
      ["ratio E", delta === null ? "–" : number(Math.exp(delta))],
      ["entropy H", h === null ? "–" : `${number(h)} nats`],
      ["δ²/(H+ε), τ = " + number(tau), delta === null || h === null ? "–" : number(delta * delta / (h + eps))],
      ["version", String(c.version[i])],
    ];
    if (seen) {
      const kept = gates.filter((_, bit) => c.keep[i] >> bit & 1), stopped = gates.filter((_, bit) => !(c.keep[i] >> bit & 1));
      list.push(["kept by", kept.join(", ") || "none"], ["stopped by", stopped.join(", ") || "none"]);
    }
    return list;
  };
  let current = null;
  const hide = () => {
    if (current) current.classList.remove("on");
    current = null;
    detail.hidden = true;
  };
  const show = (token) => {
    if (current) current.classList.remove("on");
    current = token;
    token.classList.add("on");
    const name = document.createElement("code");
    name.textContent = JSON.stringify(token.textContent);
    const list = document.createElement("dl");
    for (const [term, value] of rows(token.closest(".tokens"), Number(token.dataset.i))) {
      const dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term;
      dd.textContent = value;
      list.append(dt, dd);
    }
    const close = document.createElement("button");
    close.type = "button";
    close.textContent = "×";
    close.setAttribute("aria-label", "Close");
    close.addEventListener("click", hide);
    detail.replaceChildren(name, list, close);
    detail.hidden = false;
  };
  const tokenOf = (event) => event.target.closest ? event.target.closest(".a") : null;
  for (const box of document.querySelectorAll(".tokens")) {
    box.addEventListener("pointerover", (event) => { if (tokenOf(event)) show(tokenOf(event)); });
    box.addEventListener("click", (event) => { if (tokenOf(event)) show(tokenOf(event)); });
    box.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const tokens = [...box.querySelectorAll(".a")];
      const at = tokens.indexOf(current);
      const next = tokens[at < 0 ? 0 : Math.min(Math.max(at + step, 0), tokens.length - 1)];
      if (next) { show(next); next.scrollIntoView({ block: "nearest" }); }
    });
  }
})();
