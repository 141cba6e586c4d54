# SPDX-License-Identifier: Apache-2.0
"""Look for each of the twenty questions on the built site, in words in which people asked them.

    make docs && python docs/search.py [--browser /usr/bin/chromium]

The words are titles of public issues. It prints the rank of the question among the results of the
site's search, and fails if one is not among the first dozen, or if a page asks another site.
"""

from __future__ import annotations

import argparse
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
LAST = 12

ASKED = {
    "is-gradient-accumulation": [
        "Equivalence of gradient accumulation",
        "Is training with batch_size 64 equivalent to batch_size 8 and accumulate_gradients 8",
    ],
    "why-does-a-larger-batch": [
        "larger batch size lead to worse accuracy",
        "Val accuracy drop with trainBatch increasing",
    ],
    "why-do-2-gpus": [
        "Different GPU numbers lead to different results",
        "multi-GPU performs worse than single-GPU",
    ],
    "why-is-training-with-more": [
        "Multiple gpus training speeds are slower than 1 gpu training",
        "Training time for multiple GPUs is no less than training time for single GPUs",
    ],
    "how-do-i-get-the-same": [
        "Replicate result from a multi GPU training with less GPUs",
        "How to get the same results of your paper with only one GPU",
    ],
    "how-should-i-scale": [
        "How to scale learning rate with batch size for DDP training?",
        "Multi-GPU lr scaling",
        "How to set learning rate when you use multiple gpus?",
    ],
    "which-total-batch": [
        "Need clarity on total batch size",
        "How do you choose the value of batch-size?",
    ],
    "grpo": ["GRPO num_generations", "GRPO support batchsize > 1?"],
    "which-batch-size-for-fine": ["Optimal hyperparameter for fine tuning LLM", "LoRA batch size"],
    "which-batch-size-for-diff": ["diffusion batch size"],
    "how-do-i-choose-a-batch-size-ramp": [
        "Batch size ramp for larger models",
        "Add rampup batch size support",
    ],
    "does-the-learning-rate-schedule": [
        "Confusion about the interaction between gradient_accumulation_steps and lr_scheduler",
        "How to set num_training_steps in lr_scheduler properly",
    ],
    "what-is-the-largest": [
        "Add Largest batch size finder",
        "auto_find_batch_size should say what batch size it is using",
    ],
    "loss-spikes": ["Fix loss spikes", "Beta2 gets a bit wacky with very large batch sizes"],
    "is-my-shuffle": [
        "Increase shuffle buffer size",
        "Shuffle buffer for controlling sample correlation",
    ],
    "is-there-a-callback": ["Log the average gradient norm", "Grad alignment/variance callback"],
    "how-many-steps": ["Should I reduce max_steps when using more GPUs?"],
    "which-batch-size-was": ["the effective batch size used during the training"],
    "can-i-train-with-batch-size-1": ["Question about batch size 1"],
    "which-learning-rate-and-batch-size-for-muon": ["lr scheduling with muon", "Muon batch size"],
}
"""The beginning of each question's anchor, and how it was asked."""


class Quiet(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *_: object) -> None:
        pass


def rank(page: Page, address: str, words: str, anchor: str) -> int | None:
    """Return the place of a question among the results; None if it is not among them."""
    page.goto(f"{address}/?q={quote(words)}")
    page.locator(".md-search-result__link").first.wait_for(state="attached", timeout=20_000)
    found = page.locator(".md-search-result__link").evaluate_all(
        "links => links.map(link => link.getAttribute('href'))"
    )
    places = (k for k, link in enumerate(found, 1) if "questions/" in link and f"#{anchor}" in link)
    return next(places, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--browser", default="/usr/bin/chromium")
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    others: set[str] = set()
    failed = False
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=arguments.browser, args=["--no-sandbox"]
        )
        page = chromium.new_page()
        page.on("request", lambda request: others.add(request.url))
        for anchor, titles in ASKED.items():
            for words in titles:
                place = rank(page, address, words, anchor)
                failed |= place is None or place > LAST
                print(f"{place or 'not found':>9}  {words}", flush=True)
        for file in sorted(SITE.rglob("*.html")):
            page.goto(f"{address}/{file.relative_to(SITE)}")
            page.wait_for_load_state("networkidle")
        chromium.close()
    if elsewhere := sorted(url for url in others if url.startswith("http") and address not in url):
        print("Asked other sites:", *elsewhere)
    sys.exit(failed or bool(elsewhere))


if __name__ == "__main__":
    main()
