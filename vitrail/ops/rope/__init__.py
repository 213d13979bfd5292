"""Rotary position embedding: tables of angles, and the rotation of pairs of channels by them."""
