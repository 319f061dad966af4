# shellcheck shell=bash
# What both batch scripts do with the run: start it on every node, let it save when Slurm wants the job to end, and
# decide by its exit code whether the job comes back. Sourced from the root of the clone; needs $max_restarts.

stopping=
step=

say() { echo "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $1" >&2; }

stop() {
    stopping=yes
    # The step is told, not srun, which would not wait for it; again and again, since one that just starts hears nothing.
    while [ -n "$step" ] && kill -0 "$step" 2>/dev/null; do
        scancel --quiet --signal=TERM "$SLURM_JOB_ID"
        timeout 10 tail --pid="$step" --sleep-interval=0.5 -f /dev/null
    done
}
trap stop USR1 TERM

run_step() { # COMMAND..., once per node
    local code=0
    if [ -z "$stopping" ]; then
        # When one node's launcher has ended, the others get as long as the whole job would: they may be saving.
        # Since Slurm 22.05 a step has one CPU unless told otherwise, and a single task may be bound to one.
        srun --wait=120 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=none "$@" &
        step=$!
        [ -z "$stopping" ] || stop
        wait "$step" || code=$?
        # A signal interrupts the first wait, and this is then the step's own code.
        if [ -n "$stopping" ]; then code=0; wait "$step" || code=$?; fi
    else
        code=75
    fi
    case $code in
        0) say "done"; exit 0 ;;
        75) ;;
        2 | 78 | 126 | 127) say "exit code $code: trying again cannot help"; exit "$code" ;;
        *)
            if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_restarts" ]; then
                say "exit code $code, and $max_restarts restarts are enough"
                exit "$code"
            fi
            ;;
    esac
    # Slurm would bring back a cancelled job as well.
    if [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = RUNNING ]; then
        say "exit code $code: requeued"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
