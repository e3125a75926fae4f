#!/bin/sh
# Makes src/paceline/report/assets/echarts.js: Apache ECharts with the charts that a report draws.
# Needs node and npm; the same versions give the same bytes. Run it after changing entry.js.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
assets=$here/../../src/paceline/report/assets
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
npm init -y >/dev/null
npm install --silent --no-audit --no-fund --ignore-scripts echarts@6.1.0 zrender@6.1.0 tslib@2.3.0 esbuild@0.25.12
cp "$here/entry.js" .
npx esbuild entry.js --bundle --minify --format=iife --global-name=echarts --target=es2018 \
  --charset=ascii --legal-comments=none --define:process.env.NODE_ENV='"production"' \
  --banner:js="/* Apache ECharts 6.1.0 (Apache-2.0), zrender (BSD-3-Clause), tslib (0BSD), parts of D3 (BSD-3-Clause); see ECHARTS-LICENSES.txt */" \
  --outfile=echarts.js --log-level=warning
cp echarts.js "$assets/echarts.js"
{
  for package in echarts zrender tslib; do
    for file in NOTICE LICENSE LICENSE.txt licenses/LICENSE-d3; do
      [ ! -f "node_modules/$package/$file" ] || {
        printf -- '---- %s %s: %s ----\n\n' "$package" \
          "$(node -p "require('./node_modules/$package/package.json').version")" "$file"
        cat "node_modules/$package/$file"
        printf '\n\n'
      }
    done
  done
} >"$assets/ECHARTS-LICENSES.txt"
sha256sum "$assets/echarts.js"
