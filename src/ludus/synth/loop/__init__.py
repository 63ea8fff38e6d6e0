"""The closed loop of data and training: train, probe, expand what fails, verify labels, accumulate, again.

`expansion` measures (GCP), makes new examples (EDDE) and has them judged (JGLV); `method` is
`ludus synth looptool`.
"""
