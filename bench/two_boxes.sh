#!/bin/bash
# The whole box on two GPUs of one machine at the same time: 80 conversations in bfloat16 on GPU 0, 160 in
# 8-bit rings on GPU 1, nine minutes each, every process on cores of its own (32 wanted).
#
#     bash bench/two_boxes.sh FOLDER [MINUTES]      FOLDER holds B and B8, as `bench.random_bundle graphs` makes them:
#     python -m bench.random_bundle graphs FOLDER/B --batches 1-80 --attention ring
#     python -m bench.random_bundle graphs FOLDER/B8 --batches 1-160 --attention ring --cache e4m3
#
# Draws the weights (15 s, 16 GB), then starts both boxes in sessions of their own, so that they outlive the shell
# that started them, and returns. They are done when FOLDER/done.0 and FOLDER/done.1 are there, about
# MINUTES + 1.5 later: FOLDER/log.0, FOLDER/log.1, FOLDER/run.0.json, FOLDER/run.1.json. Nothing else should run on
# the machine: a process that dies with a GPU full of pages stalls its neighbours (LOG.md).
set -eu
folder=$(realpath "$1") minutes=${2:-9.1}
rm -f "$folder"/done.* "$folder"/log.* "$folder"/run.*.json
rm -rf "$folder"/run.0 "$folder"/run.1
python3 -m bench.random_bundle weights "$folder/B"
python3 -m bench.ring_tick link "$folder/B" "$folder/B8"

box() { # GPU BUNDLE SESSIONS CORES CALLERS-ON
  CUDA_VISIBLE_DEVICES=$1 OMP_NUM_THREADS=1 setsid bash -c "
    taskset -c $4 python3 -m bench.whole_box $2 --executor cuda --sessions $3 --minutes $minutes --stagger 0.2 \
      --no-hashes --callers-on $5 --out $folder/run.$1 --json $folder/run.$1.json > $folder/log.$1 2>&1
    echo rc \$? >> $folder/log.$1; touch $folder/done.$1" < /dev/null > /dev/null 2>&1 &
}

box 0 "$folder/B" 80 0-7 8-15
box 1 "$folder/B8" 160 16-23 24-31
