#!/usr/bin/env bash
# From a fresh clone to a small chatbot that you trained, in under 10 minutes on 2 CPU cores:
#   bash scripts/quickstart.sh           installs into .venv, pretrains (killed once, resumed), SFT, LoRA, ten questions
#   bash scripts/quickstart.sh ARGS...   the arguments go to all three trainings, as in: --seed 1
# Ctrl-C stops it at any moment. Started again it goes on from the newest checkpoint in out/quickstart; when all steps
# are done it only asks the questions again. To begin anew: rm -r out/quickstart
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
runs=out/quickstart

say "1/6 looking for Python and its packages in .venv"
install requirements.txt

# Two processes show what many do. Each needs a GPU of its own, and gloo cannot add up gradients on Apple's, so with one
# GPU, or on a Mac, one is right. bfloat16 is twice as fast where the CPU has it, and ten times slower where it has not.
read -r ranks dtype where < <(.venv/bin/python - <<'PYTHON'
import sys
import torch
from trainer.advice import cpu_has_bfloat16

gpus = torch.cuda.device_count()
quick = gpus or cpu_has_bfloat16()
print(min(gpus, 2) or (1 if sys.platform == "darwin" else 2), "bfloat16" if quick else "float32",
      "NCCL on GPUs" if gpus > 1 else "the GPU" if gpus or torch.backends.mps.is_available() else "gloo on the CPU")
PYTHON
)
launch="-m scripts.launch --nproc_per_node $ranks"
[ "$ranks" -gt 1 ] || launch=""

given=("$@") # an empty list is unset for the bash of macOS
start() { # STAGE SCRIPT ARGS...: the same command every time begins, or goes on from the newest checkpoint
    local run=$runs/$1
    shift
    .venv/bin/python $launch "$@" --dtype "$dtype" --num_workers 0 --lr_scaling none --checkpoint_interval 200 \
        --log_interval 50 ${given[@]+"${given[@]}"} --out_dir "$run" &
    training=$!
}
finish() {
    wait "$training" || { code=$?; fail "the training ended with code $code; the lines above say why$([ $code -ne 78 ] || echo " (to begin anew: rm -r $runs)")"; }
}
stop() {
    trap '' INT TERM HUP
    if [ -n "$training" ]; then
        kill -TERM "$training" 2>/dev/null || true # the ranks finish their step and save it
        wait "$training" || true
    fi
    say "stopped; the same command goes on from here"
    exit 130
}
pretrain() {
    start pretrain train_pretrain.py --hidden_size 256 --num_hidden_layers 4 --num_attention_heads 4 --qk_norm \
        --max_seq_len 128 --batch_size $((16 / ranks)) --max_steps 700 --learning_rate 3e-3
}
is_running() { kill -0 "$training" 2>/dev/null; }
has_checkpoint() { compgen -G "$runs/pretrain/step_????????" >/dev/null; }
logged() { cat "$runs/pretrain/metrics.jsonl" 2>/dev/null | wc -l; }

training=""
trap stop INT TERM HUP
if has_checkpoint; then
    say "2/6 $runs/pretrain has a checkpoint: the same command goes on from there"
    pretrain
else
    say "2/6 pretraining 4.6 million parameters on texts; processes: $ranks, $where, $dtype (2 to 3 minutes on 2 cores)"
    pretrain
    until has_checkpoint || ! is_running; do sleep 0.2; done
    seen=$(logged)
    until [ "$(logged)" -gt "$seen" ] || ! is_running; do sleep 0.2; done
    if is_running; then
        kill -9 "$training" || true # its ranks die with it
        { wait "$training" || true; } 2>/dev/null
        echo # the progress bar did not get to end its line
        say "3/6 killed it with SIGKILL; the same command again goes on from the newest checkpoint"
        pretrain
    fi
fi
finish

say "4/6 SFT: it learns to answer (3 to 4 minutes on 2 cores)"
start sft train_sft.py --from_weight "$runs/pretrain" --max_seq_len 256 --batch_size $((8 / ranks)) --epochs 6 \
    --learning_rate 2e-3
finish

say "5/6 LoRA: it learns who it is"
start lora train_lora.py --from_weight "$runs/sft" --max_seq_len 256 --batch_size $((8 / ranks)) --max_steps 120 \
    --learning_rate 5e-3 --lora_rank 8 --lora_alpha 16 --data_weights 0.75 0.25 \
    --data_path dataset/starter/sft.jsonl dataset/starter/lora_identity.jsonl
finish
trap - INT TERM HUP

say "6/6 ten questions that it has not read, chosen before it was trained"
.venv/bin/python -m scripts.evaluate "$runs/lora" dataset/starter/quiz.jsonl
say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; talk to it: .venv/bin/python -m scripts.chat --load_from $runs/lora"
