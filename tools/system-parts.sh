#!/bin/sh
# Installs what the virtual cluster and the tests need from Debian's packages.
# Usage: tools/system-parts.sh [lab|all]. Quick when everything is there; says what is missing
# where it may not install.
set -eu

lab="openssh-client:ssh openssh-server:/usr/sbin/sshd iproute2:ip iptables:iptables util-linux:nsenter procps:ps"
tests="git:git dataset-fashion-mnist:/usr/share/datasets/fashion-mnist tmux:tmux"

case "${1:-lab}" in
  lab) wanted="$lab" ;;
  all) wanted="$lab $tests" ;;
  *) echo "usage: $0 [lab|all]" >&2; exit 2 ;;
esac

missing=""
for part in $wanted; do
  package=${part%%:*}
  sign=${part#*:}
  case "$sign" in
    /*) [ -e "$sign" ] || missing="$missing $package" ;;
    *) command -v "$sign" >/dev/null 2>&1 || missing="$missing $package" ;;
  esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing:$missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "not installed (no root, or no apt-get):$missing" >&2
fi
