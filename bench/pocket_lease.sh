#!/bin/bash
# One half of the pocket model on a machine with one GPU that is lent for minutes, in one command.
#
#     bash bench/pocket_lease.sh pack BANK RUN FOLDER     here: what must travel, into FOLDER (about 43 MB)
#     bash bench/pocket_lease.sh codec SECONDS FOLDER OUT     there: train the codec, then copy what is left into OUT
#     bash bench/pocket_lease.sh lm SECONDS FOLDER OUT        there: the language model on that codec
#
# SECONDS are training's; starting and ending take about 30 more. `lm` continues in the folder that `codec` left on
# the machine, or, if that machine is gone, from the checkpoints in FOLDER/start (pack them again first). Checkpoints
# are written every minute and copied as soon as they are, so a command that is cut off loses a minute.
set -eu
what=$1
if [ "$what" = pack ]; then
  bank=$2 run=$3 folder=$4
  rm -rf "$folder"; mkdir -p "$folder/start" "$folder/whl"
  cp -r "$bank" "$folder/bank"
  # Without Adam's moments, which are twice as large; the language model in float16, as a bundle stores it.
  cp "$run"/codec.safetensors "$run"/listener.safetensors "$folder/start/"
  python3 - "$run/lm.safetensors" "$folder/start/lm.safetensors" <<'P'
import sys
from safetensors import safe_open
from safetensors.torch import load_file, save_file
with safe_open(sys.argv[1], "pt") as file:
    told = file.metadata()
save_file({name: tensor.half() for name, tensor in load_file(sys.argv[1]).items()}, sys.argv[2], told)
P
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$folder/whl" cffi==2.1.1 msgspec==0.23.0 pycparser==3.12 soundfile==0.14.0
  du -sh "$folder"
  exit
fi
seconds=$2 folder=$(realpath "$3") out=$4 work=/tmp/pocket
mkdir -p $work/site
for wheel in "$folder"/whl/*.whl; do python3 -m zipfile -e "$wheel" $work/site; done
export PYTHONPATH=$work/site:$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
[ -e $work/codec.safetensors ] || cp "$folder"/start/*.safetensors $work/
nvidia-smi -L
keep() { # what there is by now: a checkpoint is renamed into its place, so it is whole
  cp $work/"$what"*.safetensors $work/"$what".log "$out"/ 2> /dev/null || true
  [ "$what" = lm ] || cp $work/listener*.safetensors "$out"/ 2> /dev/null || true
}
while sleep 20; do keep; done &
keeper=$!
ended=0
python3 -m export.pocket.cli train "$folder/bank" $work --workers 12 --"$what"-seconds "$seconds" > $work/"$what".log 2>&1 || ended=$?
kill $keeper
keep
tail -n 12 $work/"$what".log
exit $ended
