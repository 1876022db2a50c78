"""Muon and SOAP, which update whole matrices: one rank owns each where weights are sharded."""
