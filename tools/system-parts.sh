#!/bin/sh
# Installs what the virtual cluster and the tests need from Debian's packages.
# Usage: tools/system-parts.sh [lab|all]. Quick when everything is there; says what is missing
# where it may not install.
set -eu

lab="openssh-client:ssh openssh-server:/usr/sbin/sshd iproute2:ip iptables:iptables nftables:nft util-linux:nsenter procps:ps"
tests="git:git dataset-fashion-mnist:/usr/share/datasets/fashion-mnist tmux:tmux openssl:openssl"
# schedulers and containers: only their programs are used, started by the tests in virtual hosts
launchers="mpich:mpiexec.hydra openmpi-bin:mpiexec.openmpi slurm-wlm:/usr/sbin/slurmctld munge:/usr/sbin/munged docker.io:/usr/sbin/dockerd"
# what comes from PyPI and must not get into the environment that is tested
extra=${PACELINE_TEST_PARTS:-/opt/paceline-test}
frameworks="accelerate lightning pytorch-lightning lightning-utilities torchmetrics transformers huggingface_hub tokenizers regex tqdm psutil packaging requests httpx httpcore h11 anyio idna certifi sniffio urllib3 charset-normalizer hf-xet typer shellingham fsspec"

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
  python=$(dirname "$0")/../.venv/bin/python
  [ -x "$python" ] || python=python3
  if [ ! -e "$extra/impi/bin/mpiexec.hydra" ]; then
    echo "installing: Intel MPI (impi-rt) in $extra/impi"
    "$python" -m venv "$extra/impi" && "$extra/impi/bin/pip" install -q impi-rt
  fi
  if [ ! -e "$extra/frameworks/.made" ]; then
    echo "installing: Accelerate, Lightning, Transformers in $extra/frameworks"
    # --no-deps: they are to use the torch of the environment that is tested
    "$python" -m pip install -q --no-deps --upgrade --target "$extra/frameworks" $frameworks &&
      touch "$extra/frameworks/.made"
  fi
}

if [ "${1:-lab}" = all ]; then
  if mkdir -p "$extra" 2>/dev/null && [ -w "$extra" ]; then
    pip_parts || echo "not installed: what comes from PyPI for the launchers' tests" >&2
  else
    echo "not installed (may not write to $extra): Intel MPI, Accelerate, Lightning, Transformers" >&2
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
