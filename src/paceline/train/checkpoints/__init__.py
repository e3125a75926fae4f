"""Checkpoints that are whole or not there, and are found again at any world size.

A checkpoint is a folder ``checkpoints/STEP`` (``STEP.TOKEN`` of later writers) with

========================  ===============================================================
weights.safetensors       the model's state by name; of tied weights the first name only
frozen-HASH.safetensors   parameters that are not trained: a hard link to the same file of the
                          checkpoint before, where there are links, as long as none changes
optimizer.safetensors     tensors of the optimizer, the schedule and the scaler
random.safetensors        states of every rank's random generators
state.json                position in the data, schedule, everything else that is no tensor
manifest.json             size and hash of each of these files, and of itself
========================  ===============================================================

Where every rank holds shards and sees the folder, ``weights/RANK.safetensors`` and
``optimizer/RANK.safetensors`` hold each rank's own.

Nothing in it is executed when it is read. It is written under a temporary name, flushed to the
disk, and renamed when it is complete.

=========  ======================================================================================
format     the files: names, contents, manifest
capture    a training's state at one moment
shards     the same of a sharded model, through torch's distributed checkpoint
writer     a thread that writes what was captured; parts of several ranks
store      a run's folder of checkpoints, and whose it is
copies     on other hosts' disks: who sends to whom, and the thread that sends
receiver   the thread that takes copies; how they travel
resume     the wanted checkpoint on every rank, and into the training
keeper     when to save, to stop and to resume: what a session calls
=========  ======================================================================================
"""
