#!/bin/sh
# Installs what the virtual cluster and the tests need from Debian's packages.
# Usage: tools/system-parts.sh [lab|all]. Quick when everything is there; says what is missing
# where it may not install.
set -eu

lab="openssh-client:ssh openssh-server:/usr/sbin/sshd iproute2:ip iptables:iptables nftables:nft util-linux:nsenter procps:ps"
tests="e2fsprogs:mkfs.ext4 samba:smbd samba-common-bin:smbpasswd cifs-utils:mount.cifs user-mode-linux:linux.uml gcc:gcc libc6-dev:/usr/include/stdio.h git:git dataset-fashion-mnist:/usr/share/datasets/fashion-mnist tmux:tmux openssl:openssl zsh:zsh fish:fish tcsh:tcsh dash:dash chromium:chromium"
# schedulers and containers: only their programs are used, started by the tests in virtual hosts
launchers="mpich:mpiexec.hydra openmpi-bin:mpiexec.openmpi slurm-wlm:/usr/sbin/slurmctld munge:/usr/sbin/munged docker.io:/usr/sbin/dockerd"
# what comes from PyPI and must not get into the environment that is tested
extra=${PACELINE_TEST_PARTS:-/opt/paceline-test}
frameworks="accelerate lightning pytorch-lightning lightning-utilities torchmetrics trl transformers huggingface_hub tokenizers regex tqdm psutil packaging requests httpx httpcore h11 anyio idna certifi sniffio urllib3 charset-normalizer hf-xet typer shellingham fsspec tensorboardX"
torchvision="torchvision==0.28.0"  # the release for the torch of the Makefile
# somebody else's scripts, which the pages name: NAME REPOSITORY COMMIT FOLDER
scripts="pytorch-examples https://github.com/pytorch/examples 77f55b912142e11fcfdf5b530231fb9c52f181e8 imagenet
intel-ai-containers https://github.com/intel/ai-containers 3b6c29b3600e8fa119af1a21b0d098b6cd567563 preset/deep-learning/demo/pytorch-distributed"

case "${1:-lab}" in
  lab) wanted="$lab" ;;
  all) wanted="$lab $tests $launchers" ;;
  *) echo "usage: $0 [lab|all]" >&2; exit 2 ;;
esac

missing=""
for part in $wanted; do
  package=${part%%:*}
  sign=${part#*:}
  case "$sign" in
    /*) [ -e "$sign" ] || missing="$missing $package" ;;
    *) PATH="$PATH:/usr/sbin:/sbin" command -v "$sign" >/dev/null 2>&1 || missing="$missing $package" ;;
  esac
done

pip_parts() {
  python=$extra/impi/bin/python  # the environment that is tested may be in the making
  if [ ! -e "$extra/impi/bin/mpiexec.hydra" ]; then
    echo "installing: Intel MPI (impi-rt) in $extra/impi"
    "${PYTHON:-python3}" -m venv "$extra/impi" && "$python" -m pip install -q impi-rt
  fi
  # --no-deps: they are to use the torch of the environment that is tested
  into frameworks $frameworks
  into torchvision $torchvision
}

# into FOLDER PACKAGE…: made again when the list has changed
into() {
  folder=$extra/$1
  shift
  [ "$(cat "$folder/.made" 2>/dev/null)" != "$*" ] || return 0
  echo "installing in $folder: $*"
  "$python" -m pip install -q --no-deps --upgrade --target "$folder" "$@" && echo "$*" >"$folder/.made"
}

# Without a way to their repository their tests say that they were not run.
other_scripts() {
  # shellcheck disable=SC2086
  set -- $scripts
  while [ $# -gt 0 ]; do
    other_script "$@"
    shift 4
  done
}

other_script() {
  folder=$extra/scripts/$1
  [ ! -d "$folder" ] || return 0
  echo "fetching $2 at $3 into $folder"
  { git init -q "$folder.part" && git -C "$folder.part" fetch -q --depth 1 "$2" "$3" &&
    git -C "$folder.part" checkout -q FETCH_HEAD -- "$4" LICENSE && mv "$folder.part" "$folder"; } \
    2>/dev/null || { rm -rf "$folder.part"; echo "not fetched (no way to $2): its tests will not run" >&2; }
}

if [ "${1:-lab}" = all ]; then
  if mkdir -p "$extra" 2>/dev/null && [ -w "$extra" ]; then
    pip_parts || echo "not installed: what comes from PyPI for the launchers' tests" >&2
    other_scripts
  else
    echo "not installed (may not write to $extra): Intel MPI, Accelerate, Lightning, trl, Transformers, torchvision" >&2
  fi
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing:$missing"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # RUNLEVEL=1: the daemons among them are for the virtual hosts and need not run here
  RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
  echo "not installed (no root, or no apt-get):$missing" >&2
fi
