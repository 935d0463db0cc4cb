"""Program that runs an owner's model code: `python -m logitd.model.owner_code.process FD FOLDER`.

It runs the owner's file with the user's rights, but without network access. It imports only its own
modules, torch and safetensors, because the owner's modules may have any other name.

  network.py   blocks network access
  define.py    runs the definitions of the owner's file
  build.py     makes the model with the values of the checkpoint, and loads its weights
  call.py      computes logits
  measure.py   measures facts: vocabulary, context length, stages
  answer.py    computes passes on request, with the outputs of submodules
  wire.py      frames of JSON and float32 between the processes
"""
