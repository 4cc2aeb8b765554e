#!/bin/sh
# tests/browser/run.sh PYTHON: bring Playwright and Chromium where this machine allows it, then open the pages in it.
# Where one of them cannot be had, say so and end well: a browser is no part of what moe_rl needs.
set -u
python=$1

not_run() {
    echo "make test-browser: NOT RUN: $1"
    exit 0
}

has_browser() {
    for name in chromium chromium-browser google-chrome; do
        command -v "$name" >/dev/null && return 0
    done
    return 1
}

"$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt playwright ||
    not_run "Playwright could not be installed"
if ! has_browser; then
    root=""
    [ "$(id -u)" = 0 ] || root="sudo -n"
    command -v apt-get >/dev/null || not_run "no Chromium was found, and there is no apt-get to install it with"
    log=$(mktemp)
    { timeout 300 $root apt-get update -q &&
        timeout 600 $root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y chromium fonts-dejavu-core; } \
        </dev/null >"$log" 2>&1 || not_run "no Chromium was found, and apt-get could not install it: $(tail -n 1 "$log")"
    has_browser || not_run "apt-get installed no Chromium"
fi
exec "$python" -m pytest -m browser tests/browser
