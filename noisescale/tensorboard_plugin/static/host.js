// SPDX-License-Identifier: Apache-2.0
// What TensorBoard around the page offers: its theme, its address, and the news that it has read logs again.
// The page lies in a frame of TensorBoard's page. Where a browser keeps the two apart, the page does without.

const PREFIX = "p.noise_scale."; // TensorBoard keeps what stands in its address under p.<name of the plugin>.

const host = (() => {
  try {
    return window.parent.document && window.parent;
  } catch {
    return window;
  }
})();

export function isDark() {
  if (host === window) return matchMedia("(prefers-color-scheme: dark)").matches;
  return host.document.body.classList.contains("dark-mode");
}

export function onThemeChange(changed) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  if (host === window) return;
  new MutationObserver(changed).observe(host.document.body, {attributeFilter: ["class"]});
}

export function readState() {
  return Object.fromEntries(inAddress().ours.map((part) => {
    const [name, value = ""] = part.slice(PREFIX.length).split("=");
    return [decodeURIComponent(name), decodeURIComponent(value)];
  }));
}

/** @param state Strings. What is null is left out. */
export function writeState(state) {
  const {tab, others} = inAddress();
  if (!isOpen(tab)) return;
  const ours = Object.entries(state).filter(([, value]) => value !== null)
    .map(([name, value]) => `${PREFIX}${encodeURIComponent(name)}=${encodeURIComponent(value)}`);
  written = ours.join("&");
  const hash = `#${[tab, ...others, ...ours].join("&")}`;
  if (hash === host.location.hash) return;
  host.history.replaceState(host.history.state, "", host.location.pathname + host.location.search + hash);
}

export function onStateChange(changed) {
  host.addEventListener("hashchange", () => {
    const {tab, ours} = inAddress();
    if (isOpen(tab) && ours.join("&") !== written) changed();
  });
}

let written = null; // by the page itself

function inAddress() {
  const [tab, ...parts] = host.location.hash.slice(1).split("&");
  const isOurs = (part) => part.startsWith(PREFIX);
  return {tab, ours: parts.filter(isOurs), others: parts.filter((part) => !isOurs(part))};
}

function isOpen(tab) {
  return host === window || tab === "noise_scale";
}

export function runFilter() {
  // What the run list of the tab Time Series is filtered by.
  return new URLSearchParams(host.location.search).get("runFilter") || "";
}

export function onReload(reloaded) {
  // TensorBoard says when it has read the logs again, by its button or by itself.
  const {port1, port2} = new MessageChannel();
  port1.onmessage = ({data}) => {
    const {type, id, isReply} = JSON.parse(data);
    if (isReply) return;
    port1.postMessage(JSON.stringify({type, id, payload: null, error: null, isReply: true}));
    if (type === "experimental.DataReloaded" || type === "experimental.RunsChanged") reloaded();
  };
  if (host !== window) host.postMessage("experimental.bootstrap", "*", [port2]);
}
