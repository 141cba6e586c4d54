// SPDX-License-Identifier: Apache-2.0
// The tab "Noise scale". TensorBoard calls render().

import {element, loadScript} from "./dom.js";
import {onReload, onStateChange, onThemeChange} from "./host.js";
import {Page} from "./page.js";

const POLL_MILLISECONDS = 10000;

export async function render() {
  document.documentElement.lang = "en";
  document.head.append(element("link", {rel: "stylesheet", href: "./style.css"}));
  const page = new Page();
  document.body.append(page.root);
  const refresh = () => isVisible() && page.refresh();
  setInterval(refresh, POLL_MILLISECONDS);
  onReload(refresh);
  onStateChange(() => page.readState());
  onThemeChange(() => page.setTheme());
  document.addEventListener("visibilitychange", refresh);
  window.addEventListener("beforeprint", () => page.print(true));
  window.addEventListener("afterprint", () => page.print(false));
  let wasVisible = isVisible();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (!wasVisible) refresh();
    wasVisible = isVisible();
    if (wasVisible && width !== window.innerWidth) page.drawFigures();
    width = window.innerWidth;
  });
  // The answers do not wait for the figures' library, which is large.
  await page.refresh();
  try {
    await loadScript("./plotly.js");
  } catch (error) {
    page.fault = error.message;
    page.say(page.fault, "error");
    return;
  }
  page.canDraw = true;
  page.drawFigures();
}

function isVisible() {
  // TensorBoard keeps the frame of a tab that is not open, without height.
  return !document.hidden && window.innerHeight > 0;
}
