#!/bin/bash
# One training run on a machine with one or two GPUs. Everything is told in seconds since the start.
#   device.sh start FREEZE END     starts teacher, codec and talker in the background (codec on GPU 0, talker on the last GPU)
#   device.sh watch SECONDS        waits until then, shows the logs' ends, copies checkpoints and logs to $OUT
# Run from the repository's root; $CARRY holds train.txt.gz, tok/ and the package hibari; work happens in $RUN.
CARRY=${CARRY:-.vt/carry} RUN=${RUN:-/tmp/vt}
export PYTHONPATH=$PWD/engine/voice:$PWD/$CARRY PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true
mkdir -p "$RUN/s" "$RUN/o"
if [ "$1" = start ]; then
  T=$(date +%s); echo "$T" > "$RUN/t0"
  CORES=$(nproc) GPUS=$(nvidia-smi -L | wc -l); LAST=$((GPUS - 1)); TRAIN=$((CORES / 5)); WORKERS=$((CORES - TRAIN))
  echo "$CORES cores, $GPUS GPUs, $WORKERS teachers"; nvidia-smi --query-gpu=name,memory.used --format=csv,noheader; df -h /tmp | tail -1
  OMP_NUM_THREADS=1 setsid nohup taskset -c $TRAIN-$((CORES - 1)) nice -n 5 python3 -m train.data "$CARRY/train.txt.gz" "$RUN/s" --workers $WORKERS --first "${FIRST:-0}" > "$RUN/data.log" 2>&1 &
  OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES=0 setsid nohup taskset -c 0-$((TRAIN / 2)) python3 -m train.codec "$RUN/s" "$RUN/o" --freeze-at "$2" --end-at "$3" --start "$T" $CODEC > "$RUN/codec.log" 2>&1 &
  OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES=$LAST setsid nohup taskset -c $((TRAIN / 2))-$((TRAIN - 1)) python3 -m train.talker "$RUN/s" "$RUN/o" "$CARRY/train.txt.gz" "$CARRY/tok" --end-at "$3" --start "$T" $TALKER > "$RUN/talker.log" 2>&1 &
elif [ "$1" = talker ]; then                               # (re)starts the talker alone:  device.sh talker END
  T=$(cat "$RUN/t0"); TRAIN=$(($(nproc) / 5)); LAST=$(($(nvidia-smi -L | wc -l) - 1))
  kill $(pgrep -f train.talker); sleep 2
  OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES=$LAST setsid nohup taskset -c $((TRAIN / 2))-$((TRAIN - 1)) python3 -m train.talker "$RUN/s" "$RUN/o" "$CARRY/train.txt.gz" "$CARRY/tok" --end-at "$2" --start "$T" $TALKER > "$RUN/talker.log" 2>&1 &
else
  T=$(cat "$RUN/t0")
  while [ $(($(date +%s) - T)) -lt "$2" ]; do
    sleep 1
    if grep -q Traceback "$RUN"/*.log; then echo FAILED; tail -n 30 "$RUN"/*.log; break; fi
    if grep -q "codec done" "$RUN/codec.log" && grep -q "talker done" "$RUN/talker.log"; then echo "both done"; break; fi
  done
  cp "$RUN"/o/*.part* "$RUN"/codec.log "$RUN"/talker.log "$OUT"/
  echo "== $(($(date +%s) - T)) s, shards $(ls "$RUN/s" | grep -c audio)"; tail -n 3 "$RUN/data.log"
  tail -n "${LINES_SHOWN:-16}" "$RUN/codec.log"; tail -n "${LINES_SHOWN:-16}" "$RUN/talker.log"
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader; df -h /tmp | tail -1; free -g | sed -n 2p
fi
