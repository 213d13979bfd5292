"""A picture's samples resized as Pillow's bicubic does it, bit for bit, and cut into patches. Knows
no model's sizes."""
