#!/bin/bash
# One half of the pocket model on a machine with one GPU that is lent for minutes, in one command.
#
#     bash bench/pocket_lease.sh pack BANK RUN FOLDER       here: what must travel, into FOLDER
#     bash bench/pocket_lease.sh codec SECONDS FOLDER OUT [ARGUMENT...]   there: train the codec, then copy what is left into OUT
#     bash bench/pocket_lease.sh lm SECONDS FOLDER OUT [ARGUMENT...]      there: the language model on that codec
#
# SECONDS are training's; starting and ending take about 40 more. `lm` continues in the folder that `codec` left on
# the machine, or, if that machine is gone, from the checkpoints in FOLDER/start (pack them again first). Checkpoints
# are written every minute and copied as soon as they are, so a command that is cut off loses a minute. ARGUMENTs go
# to training: `--device cpu --rehearse` tries the whole of it where there is no GPU.
set -eu
what=$1
if [ "$what" = pack ]; then
  bank=$2 run=$3 folder=$4
  rm -rf "$folder"; mkdir -p "$folder/start" "$folder/whl"
  cp -r "$bank" "$folder/bank"
  cp "$run"/listener.safetensors "$folder/start/"
  # Without Adam's moments, which are twice as large, and in float16, as a bundle stores weights; but codebooks are sums
  # over many frames, whose codes must stay what the bundle's are.
  python3 - "$run" "$folder/start" <<'P'
import sys
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import load_file, save_file
run, start = map(Path, sys.argv[1:])
for name in ("codec.safetensors", "lm.safetensors"):
    with safe_open(run / name, "pt") as file:
        told = file.metadata()
    tensors = load_file(run / name).items()
    save_file({k: v if "quantizer" in k else v.half() for k, v in tensors}, start / name, told)
P
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$folder/whl" cffi==2.1.1 msgspec==0.23.0 pycparser==3.12 soundfile==0.14.0
  du -sh "$folder"
  exit
fi
seconds=$2 folder=$(realpath "$3") out=$4 work=${POCKET_WORK:-/tmp/pocket}
shift 4
mkdir -p "$work/site" "$out"
for wheel in "$folder"/whl/*.whl; do [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" "$work/site"; done
export PYTHONPATH=$work/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
[ -e "$work/codec.safetensors" ] || cp "$folder"/start/*.safetensors "$work/"
nvidia-smi -L || true
keep() { # what there is by now: a checkpoint is renamed into its place, so it is whole
  cp "$work/$what"*.safetensors "$work/$what.log" "$out/" 2> /dev/null || true
  [ "$what" = lm ] || cp "$work"/listener*.safetensors "$out/" 2> /dev/null || true
}
while sleep 20; do keep; done > /dev/null 2>&1 & # or whoever reads our output waits for that sleep
keeper=$!
ended=0 began=$SECONDS
train() {
  ended=0
  python3 -m export.pocket.cli train "$folder/bank" "$work" --workers "${POCKET_WORKERS:-12}" \
    --"$what"-seconds "$seconds" "$@" >> "$work/$what.log" 2>&1 || ended=$?
}
train "$@"
if [ $ended != 0 ] && [ $((SECONDS - began)) -lt 100 ]; then # it never got going: this machine may capture no graphs
  tail -n 4 "$work/$what.log"
  seconds=$((${seconds%.*} - SECONDS + began))
  train --step-by-step "$@"
fi
kill $keeper || true
keep
tail -n 12 "$work/$what.log"
exit $ended
