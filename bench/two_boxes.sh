#!/bin/bash
# The whole box twice: 80 conversations in bfloat16 and 160 in 8-bit rings, nine minutes each, every process on cores
# of its own. With two GPUs at the same time (32 cores wanted), with one GPU one after the other (16).
#
#     bash bench/two_boxes.sh FOLDER [MINUTES]      FOLDER holds B and B8, as `bench.random_bundle graphs` makes them:
#     python -m bench.random_bundle graphs FOLDER/B --batches 1-80 --attention ring
#     python -m bench.random_bundle graphs FOLDER/B8 --batches 1-160 --attention ring --cache e4m3
#
# Draws the weights (15 s, 16 GB), then starts the boxes in a session of their own, so that they outlive the shell
# that started them, and returns. One is done when FOLDER/done.80 is there, the other with FOLDER/done.160, each about
# MINUTES + 1 after its start: FOLDER/log.80, FOLDER/run.80.json and so on. Nothing else should run on the machine: a
# process that dies with a GPU full of pages stalls its neighbours (LOG.md).
set -eu
folder=$(realpath "$1") minutes=${2:-9.1}
rm -rf "$folder"/done.* "$folder"/log.* "$folder"/run.*
python3 -m bench.random_bundle weights "$folder/B"
python3 -m bench.ring_tick link "$folder/B" "$folder/B8"

cat > "$folder/box.sh" <<BOX
# GPU BUNDLE SESSIONS CORES CALLERS-ON
export CUDA_VISIBLE_DEVICES=\$1 OMP_NUM_THREADS=1
taskset -c \$4 python3 -m bench.whole_box $folder/\$2 --executor cuda --sessions \$3 --minutes $minutes --stagger 0.2 \\
  --no-hashes --callers-on \$5 --out $folder/run.\$3 --json $folder/run.\$3.json > $folder/log.\$3 2>&1
echo "rc \$?" >> $folder/log.\$3
touch $folder/done.\$3
BOX

if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  both="bash $folder/box.sh 0 B 80 0-7 8-15 & bash $folder/box.sh 1 B8 160 16-23 24-31 & wait"
else
  both="bash $folder/box.sh 0 B 80 0-7 8-15; bash $folder/box.sh 0 B8 160 0-7 8-15"
fi
setsid bash -c "$both" < /dev/null > /dev/null 2>&1 &
