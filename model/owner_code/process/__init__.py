"""Program that runs an owner's model code: `python -m logitd.model.owner_code.process FOLDER FD`.

It runs the owner's file with the user's rights, but without network access. Apart from the standard
library, it imports only its own modules, torch and safetensors. The owner's modules may have any
other names, so further imports could conflict with them.

  network.py   blocks network access
  define.py    runs the definitions of the owner's file
  build.py     creates the model with the values of the checkpoint
  weights.py   loads its weights
  call.py      computes logits, also with the model's own cache
  measure.py   measures facts: vocabulary, context length, stages
  hooks.py     reads and changes the outputs of submodules
  answer.py    computes passes on request
  wire.py      sends frames of JSON and arrays between the processes
"""
