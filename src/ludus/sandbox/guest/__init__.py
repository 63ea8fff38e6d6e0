"""Code that runs in the guest: the fork server and the sessions forked from it. Standard library only.

The host loads these modules into a fresh interpreter without the packages above them (`processes.worker`).
"""
