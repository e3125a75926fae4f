#!/bin/sh
# Proves that the two commands set everything up: types them in a Debian that has nothing but what
# the README asks for. It is a root file system of its own, made by debootstrap from the mirror that
# this machine uses, with its own processes, mounts, IPC and host name, and with this machine's
# kernel, network and pip settings. The last commit of this checkout is cloned into it.
# Usage, as root: tools/fresh-machine.sh [--again] FOLDER [COMMAND]
#   FOLDER   keeps the machine (some 6 GB after all tests); remove it when you are done
#   COMMAND  a line of shell, typed in the clone (default: make demo && make test)
#   --again  goes on with the machine as the last COMMAND left it; the code is brought up to date
set -eu

suite=bookworm
# what the README says to install first; ca-certificates and apt's own parts come with any Debian
first="python3,python3-venv,make,git,ca-certificates"

again=""
if [ "${1:-}" = --again ]; then again=1; shift; fi
if [ $# -lt 1 ] || [ $# -gt 2 ]; then sed -n '2,11s/^# //p' "$0" >&2; exit 2; fi
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
command=${2:-make demo && make test}
machine=$folder/machine

[ "$(id -u)" = 0 ] || { echo "$0: it mounts and changes its root, so run it as root" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "$0: apt-get install debootstrap" >&2; exit 2; }

if [ ! -e "$folder/base/.made" ]; then
  rm -rf "$folder/base"
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT)' |
    awk -v suite="$suite" '$2 == suite && $3 == "main" { print $1; exit }')
  echo "making $suite in $folder/base"
  debootstrap --variant=minbase --include="$first" "$suite" "$folder/base" \
    ${mirror:+"$mirror"} >"$folder/debootstrap.log" || { tail "$folder/debootstrap.log"; exit 1; }
  touch "$folder/base/.made"
fi
if [ -z "$again" ] || [ ! -e "$machine" ]; then
  rm -rf "$machine"
  cp -a --reflink=auto "$folder/base" "$machine"
fi

# the network's and pip's settings, and the folders on this machine that pip's settings name
copy() { [ ! -e "$1" ] || { mkdir -p "$machine$(dirname "$1")" && cp -aL "$1" "$machine$(dirname "$1")/"; }; }
for one in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/xdg/pip; do copy "$one"; done
if [ -d "${HOME:-/root}/.config/pip" ]; then
  mkdir -p "$machine/root/.config" && cp -aL "${HOME:-/root}/.config/pip" "$machine/root/.config/"
fi
shared=$({ python3 -m pip config list; env | grep '^PIP_' || true; } | tr "='\" " '\n\n\n\n' |
  sed 's#\\n#\n#g' | sed -n 's#^file://##; s#/simple/*$##; /^\/./p' | sort -u)

if [ -d "$machine/root/paceline/.git" ]; then
  git -C "$machine/root/paceline" fetch -q "$here" HEAD
  git -C "$machine/root/paceline" reset -q --hard FETCH_HEAD
else
  git clone -q --no-local "$here" "$machine/root/paceline"
fi

# inside: the first process of the machine; it mounts, changes the root and types the command
inside='
set -eu
machine=$1; command=$2; shift 2
mount --bind "$machine" "$machine"
for one in "$@"; do
  [ -e "$one" ] || continue
  if [ -d "$one" ]; then mkdir -p "$machine$one"
  else mkdir -p "$machine$(dirname "$one")"; : >>"$machine$one"; fi
  mount --bind -o ro "$one" "$machine$one"
done
mount -t proc proc "$machine/proc"
mount --rbind /sys "$machine/sys"
mount --rbind /dev "$machine/dev"
mount -t tmpfs -o mode=1777 tmpfs "$machine/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$machine/tmp"
mount -t tmpfs -o mode=755 tmpfs "$machine/run"
mkdir -p "$machine/.before"
cd "$machine"
pivot_root . .before
umount -l /.before
hostname fresh
[ -s /etc/machine-id ] || tr -d - </proc/sys/kernel/random/uuid >/etc/machine-id  # the first boot does
cd /root/paceline
status=0
bash -c "$command" || status=$?
exit "$status"
'
pip_settings=$(env | grep '^PIP_' || true)
# $pip_settings and $shared: a word each
# shellcheck disable=SC2086
exec env -i HOME=/root USER=root LOGNAME=root SHELL=/bin/bash LANG=C.UTF-8 TERM="${TERM:-dumb}" \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ${CI:+CI="$CI"} $pip_settings \
  unshare --mount --propagation private --pid --fork --kill-child --ipc --uts \
  sh -c "$inside" inside "$machine" "$command" $shared
