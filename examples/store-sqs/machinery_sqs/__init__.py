"""SQS as broker and DynamoDB as result backend of machinery_py."""
