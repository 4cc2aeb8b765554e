#!/bin/sh
# tests/browser/run.sh PYTHON: bring Playwright and Chromium where this machine allows it, then open the pages in it.
# Where one of them cannot be had, say so and end well: a browser is no part of what moe_rl needs.
set -u
python=$1

not_run() {
    echo "make test-browser: NOT RUN: $1"
    exit 0
}

find_browser() {
    for name in chromium chromium-browser google-chrome; do
        browser=$(command -v "$name") && return 0
    done
    return 1
}

"$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright ||
    not_run "Playwright could not be installed"
if ! find_browser; then
    root=""
    [ "$(id -u)" = 0 ] || root="sudo -n"
    command -v apt-get >/dev/null || not_run "no Chromium was found, and there is no apt-get to install it with"
    log=$(mktemp)
    { timeout 300 $root apt-get update -q &&
        timeout 600 $root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y chromium fonts-dejavu-core; } \
        </dev/null >"$log" 2>&1 || not_run "no Chromium was found, and apt-get could not install it: $(tail -n 1 "$log")"
    find_browser || not_run "apt-get installed no Chromium"
fi
# A container may forbid what Chromium needs to start; that says nothing about the pages.
sandbox=""
[ "$(id -u)" = 0 ] && sandbox="--no-sandbox"
timeout 120 "$browser" --headless $sandbox --dump-dom about:blank >/dev/null 2>&1 || not_run "$browser does not start here"
exec "$python" -m pytest -m browser tests/browser
