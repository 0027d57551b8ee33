"""What every process needs before it does its work: settings, logging, waits that explain themselves.

Imports the ground alone. No torch, no gRPC.
"""
