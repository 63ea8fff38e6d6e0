"""The closed loop of data and training: train, probe, expand what fails, verify labels, accumulate, again.

`expansion` measures (GCP) and makes new examples (EDDE), `labels` has them judged (JGLV), `method` is
`ludus synth looptool`.
"""
